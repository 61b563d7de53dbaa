"""What a pipeline's file may say: errors name the step, the edge and the line, before anything is served."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.cli.config_file import read_config_file
from penstock.cli.pipeline import load_pipelines, with_pipelines_beside
from penstock.core.config import build
from penstock.core.errors import ConfigError
from penstock.gateway.pipelines.checker import check_models
from penstock.gateway.pipelines.graph import Task
from penstock.gateway.pipelines.model_call import PATHS
from penstock.gateway.pipelines.service import with_pipelines
from penstock.gateway.proxy.request_view import SURFACES
from penstock.gateway.settings.gateway import GatewaySettings, ModelSettings, routes_of
from penstock.router.routes import RouteTable
from tests.gateway.pipelines.written import problem_of, written

PYTHON = "def language(text, default='en'): ...\ndef shaped(answer): ...\nasync def later(): ..."
HEAD = "name: support\nsteps:\n"

ALL_KINDS = """
    name: support
    description: All that a pipeline can be made of.
    steps:
      language:
        python: steps.py:language
        inputs: {text: input.text}
        output: {labels: [de, en]}
      facts:
        model: small
        prompt: "{{ input.text }}"
        schema: {type: object, properties: {names: {type: array, items: {type: string}}}, required: [names]}
      each:
        map: facts.names
        step: {model: small, prompt: "{{ index }}. {{ item }} in {{ language }}"}
      both:
        parallel:
          vectors: {model: small, task: embeddings, text: each}
          kind: {model: small, task: classification, text: input.text, output: {labels: [good, bad]}}
      answer:
        branch: language
        cases:
          de: {model: small, messages: input.messages, system: "Deutsch."}
          en:
            steps:
              draft: {model: small, prompt: "{% for one in each %}{{ one }}{% endfor %}"}
              final: {model: small, task: completion, prompt: "{{ draft }} {{ both.kind.label }}"}
        fallback: {template: "I am sorry: {{ facts | tojson }}"}
"""


PAGE = Path(__file__).parents[3] / "docs" / "pipelines.md"


def test_the_file_that_the_page_begins_with_can_be_served(tmp_path: Path) -> None:
    (text,) = (block for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL) if "name:" in block)
    found = written(tmp_path, text)
    check_models(found, ["smollm2"])
    kin = "edge 'kin.label': nothing before it is called 'kin'; did you mean 'kind'?"
    assert problem_of(tmp_path, text.replace("branch: kind", "branch: kin.label")) == f"9: step 'answer': {kin}"
    assert f"support.yaml:9: step 'answer': {kin}" in PAGE.read_text()


def test_a_constant_may_stand_in_for_steps_in_parallel(tmp_path: Path) -> None:
    schema = "{type: object, properties: {a: {type: string}, b: {type: string}}, required: [a, b]}"
    text = f"""
        name: support
        steps:
          both:
            parallel: {{a: {{template: x}}, b: {{template: y}}}}
            fallback: {{value: {{a: "", b: ""}}, output: {{json: {schema}}}}}
          answer: {{template: "{{{{ both.a }}}}"}}
    """
    assert str(written(tmp_path, text).output) == "text"
    problem = problem_of(tmp_path, text.replace("required: [a, b]", "required: [a]"))
    assert "it stands in for a step that makes record of a, b" in problem


def test_the_example_can_be_served() -> None:
    config = PAGE.parents[1] / "examples" / "pipelines" / "gateway.yaml"
    settings = with_pipelines_beside(config, build(GatewaySettings, read_config_file(config).values))
    routes = with_pipelines(routes_of(settings.pools()), load_pipelines(settings.pipelines))
    assert routes.names == ["smollm2", "language", "triage", "reply"]


def test_what_models_are_asked_is_known_to_the_gateway() -> None:
    assert {PATHS[task] for task in Task} <= SURFACES.keys()


def test_every_kind_of_step_has_the_type_of_its_result(tmp_path: Path) -> None:
    found = written(tmp_path, ALL_KINDS, steps=PYTHON)
    kinds = {step.name: str(found.kinds[step.where]) for step in found.root.walk()}
    assert kinds == {
        "": "text",
        "language": "labels (de, en)",
        "facts": "json (object)",
        "each": "list of text",
        "each.step": "text",
        "both": "record of vectors, kind",
        "both.vectors": "list of vector",
        "both.kind": "labels (good, bad)",
        "answer": "text",
        "answer.de": "text",
        "answer.en": "text",
        "answer.en.draft": "text",
        "answer.en.final": "text",
        "answer.fallback": "text",
    }
    assert list(found.models) == ["small"]


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        (
            '  a: {template: "{{ inptu.text }}"}',
            "3: step 'a': edge 'inptu.text', line 1 of the template: nothing before it is called 'inptu'; did you mean "
            "'input'?",
        ),
        (
            "  a:\n    template: |\n      Hello\n      {{ input.txt }}",
            "4: step 'a': edge 'input.txt', line 2 of the template: 'input' is record of text, messages, metadata and "
            "has no 'txt'; did you mean 'text'?",
        ),
        (
            "  a: {template: x}\n  b: {model: m, messages: a}",
            "4: step 'b': edge 'a' is text, and messages is wanted",
        ),
        (
            "  a: {template: x}\n  b:\n    map: a\n    step: {template: y}",
            "5: step 'b': edge 'a' is text: a map goes over a list",
        ),
        (
            "  a: {model: m, prompt: x, choice: [de, en]}\n  b:\n    branch: a\n    cases:\n      de: {template: x}",
            "6: step 'b': no case for 'en', and no default",
        ),
        (
            "  a: {model: m, prompt: x, choice: [de, en]}\n  b:\n    branch: a\n    default: {template: x}\n"
            "    cases:\n      fr: {template: x}",
            "8: step 'b': case 'fr' never comes: 'a' is one of de, en",
        ),
        (
            "  b:\n    branch: input.text\n    cases:\n      x: {template: x}",
            "5: step 'b': 'input.text' may be anything, and no default",
        ),
        (
            "  b:\n    branch: input.text\n    default: {template: x}\n    cases:\n"
            "      x: {model: m, task: embeddings, text: input.text}",
            "5: step 'b.default': it makes text, where the cases before it make vector",
        ),
        (
            "  a:\n    model: m\n    prompt: x\n    choice: [de, en]\n    fallback: {template: hello}",
            "7: step 'a.fallback': it stands in for a step that makes labels (de, en), and makes text",
        ),
        (
            "  a:\n    model: m\n    prompt: x\n    schema: {type: object, properties: {city: {type: string}}}\n"
            '  b: {template: "{{ a.town }}"}',
            "7: step 'b': edge 'a.town', line 1 of the template: 'a' is json (object) and has no 'town'; it has city",
        ),
        (
            '  a: {template: "{% for one in input.text %}{{ one.x }}{% endfor %}"}',
            "3: step 'a': edge 'one.x', line 1 of the template: the loop goes over no list",
        ),
        ("  a: {templte: x}", "3: step 'a': it says nothing of what to run: one of model, template, value, python, "
         "branch, parallel, map, steps; did you mean 'template'?"),
        ("  a: {template: x, model: m}", "3: step 'a': a step is one thing, not model and template"),
        ("  a: {template: x, retires: 1}", "3: step 'a': unknown setting 'retires'; did you mean 'retries'?"),
        ("  a: {template: x, retries: 9}", "3: step 'a': setting 'retries': Expected `int` <= 5"),
        ("  input: {template: x}", "3: 'input' is no name for a step: it means something else in edges"),
        ("  A-b: {template: x}", "3: 'A-b' is no name for a step: lower-case letters, digits and _, beginning with a "
         "letter"),
        ("  a: {model: m}", "3: step 'a': chat needs messages or prompt"),
        ("  a: {model: m, task: embeddings}", "3: step 'a': embeddings needs text"),
        ("  a: {model: m, task: embeddings, prompt: x}", "3: step 'a': 'prompt' is not for embeddings"),
        ("  a: {model: m, task: rerank, query: input.text}", "3: step 'a': rerank needs documents: a list of texts"),
        ("  a: {model: m, task: rerank, query: input.text, documents: input.text}", "3: step 'a': edge 'input.text' is "
         "text, and list of text is wanted"),
        ("  a: {model: m, prompt: x, query: input.text}", "3: step 'a': 'query' is not for chat"),
        ("  a: {model: m, prompt: x, parameters: {stream: true}}", "3: step 'a': 'stream' is set by the step itself, "
         "not by its parameters"),
        ("  a: {model: m, prompt: x, choice: [a], schema: {}}", "3: step 'a': an answer is one of a choice, or by a "
         "schema, not both"),
        ("  a: {model: m, prompt: x, schema: {type: objet}}", "3: step 'a': the type of a schema is one of string, "
         "integer, number, boolean, null, array, object, not 'objet'"),
        ('  a: {template: "{{ input.text"}', "3: step 'a': line 1 of the template: unexpected end of template, "
         "expected 'end of print statement'."),
        ('  a: {template: "{% include input.text %}"}', "3: step 'a': a template of a step has no macros and includes "
         "nothing"),
        ("  a: {value: 7, output: {labels: [a]}}", "3: step 'a': the value is no labels (a): it is no label: a text, "
         "or a label and its scores"),
        ("  a: {template: x, output: json_}", "3: step 'a': 'json_' is no type; did you mean 'json'?"),
        ("  a: {template: x, output: vector}", "3: step 'a': its result is text, which is no vector"),
        ("  a:\n    steps: {b: {template: x}}\n    result: c", "5: step 'a': result: there is no step 'c'"),
        ("  a: {template: x}\n  b: {steps: {a: {template: y}}}", "4: step 'b.a': there is a step 'a' already, outside "
         "this block"),
        ("  a: {template: x}\noutput: b", "4: output: there is no step 'b'"),
        ("  a: {python: steps.py:language}", "3: step 'a': a Python step declares its output: text, labels, vector, "
         "{json: …} or {list: …}"),
        ("  a: {python: steps.py:langage, output: text}", "3: step 'a': steps.py has no function 'langage'; did you "
         "mean 'language'?"),
        ("  a: {python: steps.py:language, output: text}", "3: step 'a': 'language' needs an input 'text'"),
        ("  a: {python: steps.py:shaped, inputs: {anwser: input.text}, output: text}", "3: step 'a': 'shaped' has no "
         "argument 'anwser'; did you mean 'answer'?"),
        ("  a: {python: steps.py:later, output: text}", "3: step 'a': 'later' is async: a step's process calls one "
         "plain function at a time"),
        ("  a: {python: os.system, output: text}", "3: step 'a': a Python step is FILE.py:FUNCTION"),
        ("  a: {value: [1], output: {list: json}}\n  b:\n    map: a\n    max_items: 10000\n    retries: 1\n"
         "    step: {template: x}", "2: one request could come to 20004 attempts at steps, more than 10000: lower "
         "max_items or retries"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, steps: str, problem: str) -> None:
    assert problem_of(tmp_path, HEAD + steps, steps=PYTHON) == problem


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ('  a: {template: "{{ b }}"}\n  b: {template: "{{ a }}"}', "nothing before it is called 'b'"),
        ('  a: {template: "{{ a }}"}', "nothing before it is called 'a'"),
        ("  a: &a\n    steps: {b: *a}", "steps are nested more than 16 times"),
        ("  a: " + "{steps: {a: " * 40 + "{template: x}" + "}}" * 40, "steps are nested more than 16 times"),
        (
            f"  x: {{steps: &s {{{', '.join(f's{one}: {{template: x}}' for one in range(64))}}}}}\n"
            + "".join(f"  x{one}: {{steps: *s}}\n" for one in range(16)),
            "there are more than 1000 steps",
        ),
        (
            "  list: {value: [1], output: {list: json}}\n"
            "  a: {map: list, max_items: 10000, step: {map: list, max_items: 10000, step: {template: x}}}",
            "one request could come to 100010003 attempts at steps, more than 10000: lower max_items or retries",
        ),
        ("  a: &a {value: {x: *a}}", "it is nested more than 64 times"),
        ("  a: {template: '{{ input.text.__class__ }}'}", "has no '__class__'"),
        ("  a: {template: '{{ input.text.format(input) }}{% include \"x\" %}'}", "includes nothing"),
        ("  a: {python: '/bin/sh:x', output: text}", "is not Python"),
    ],
)
def test_a_hostile_graph_is_refused(tmp_path: Path, steps: str, problem: str) -> None:
    assert problem in problem_of(tmp_path, HEAD + steps)


def test_a_file_that_is_nested_without_end_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        written(tmp_path, f"{HEAD}  a: {'[' * 500}{']' * 500}")


def test_a_python_file_that_is_none_is_told(tmp_path: Path) -> None:
    problem = problem_of(tmp_path, HEAD + "  a: {python: steps.py:it, output: text}", steps="def it(:")
    assert problem.startswith(f"3: step 'a': {tmp_path}/steps.py is not Python: invalid syntax")
    problem = problem_of(tmp_path, HEAD + "  a: {python: none.py:it, output: text}")
    assert problem == f"3: step 'a': {tmp_path}/none.py cannot be read: No such file or directory"


def test_nothing_in_a_python_file_is_run_by_a_check(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    source = f"open({str(mark)!r}, 'w')\ndef it(): ..."
    written(tmp_path, HEAD + "  a: {python: steps.py:it, output: text}", steps=source)
    assert not mark.exists()


def routes(*names: str) -> RouteTable:
    return routes_of({name: ModelSettings(replicas=["http://127.0.0.1:1"], aliases=[f"{name}-1"]) for name in names})


def test_a_step_asks_a_model_that_is_there(tmp_path: Path) -> None:
    found = written(tmp_path, HEAD + "  a: {model: small, prompt: x}")
    check_models(found, ["small"])
    with pytest.raises(ConfigError, match=r"yaml:3: step 'a': there is no model 'small' in the configuration; did you"):
        check_models(found, ["smal"])


def test_a_pipeline_is_no_model_of_a_step_a_fallback_or_a_rule(tmp_path: Path) -> None:
    found = written(tmp_path, HEAD + "  a: {model: support, prompt: x}")
    with pytest.raises(ConfigError, match="step 'a': 'support' is a pipeline, and a step asks a model"):
        with_pipelines(routes("small"), [found])
    found = written(tmp_path, HEAD + "  a: {model: small-1, prompt: x}")
    table = with_pipelines(routes("small"), [found])
    assert table.find("support").is_pipeline
    with pytest.raises(ConfigError, match="already"):
        with_pipelines(routes("small", "support"), [found])
    with pytest.raises(ConfigError, match="already"):
        with_pipelines(routes("small"), [found, found])
