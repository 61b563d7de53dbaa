"""OpenAI itself and whatever speaks like it: nothing is known of how busy it is. And our own replicas.

A penstock replica pushes reports and takes what the gateway adds by itself (`gateway.replicas`, `api.relay`).
"""

from __future__ import annotations

from penstock.dialects.dialect import Dialect, Health, Sign, names_in

# Many a server of which nothing is known is one of the engines, behind a key.
_FIELDS = names_in(
    "ignore_eos min_tokens stop_token_ids skip_special_tokens include_stop_str_in_output truncate_prompt_tokens "
    "add_generation_prompt continue_final_message chat_template_kwargs "
    "guided_json guided_regex guided_choice guided_grammar structured_outputs json_schema regex ebnf"
)

OPENAI = Dialect(
    name="openai",
    health=Health(b"/v1/models"),
    fields=_FIELDS | names_in("usage top_a safe_prompt random_seed prompt_mode reasoning_format"),  # of providers
)

PENSTOCK = Dialect(
    name="penstock",
    signs=(Sign(b'"owned_by":"penstock"', path="/v1/models"),),
    health=Health(deep=b"/health/deep", has_503_while_starting=True),
    fields=_FIELDS,
    salt="cache_salt",
)
