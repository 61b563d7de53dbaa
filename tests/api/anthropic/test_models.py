from anthropic.pagination import SyncPage
from anthropic.types import ModelInfo

from penstock.api.openai import ModelCard, model_list, model_object

CARD = ModelCard(id="org/name", created=1_700_000_000, max_model_len=2048)


def test_a_model_is_what_anthropics_client_expects() -> None:
    model = ModelInfo.model_validate_json(model_object(CARD))
    assert (model.id, model.type, model.lifecycle, model.max_input_tokens) == ("org/name", "model", "active", 2048)
    assert model.created_at.timestamp() == 1_700_000_000


def test_the_list_is_one_page() -> None:
    page = SyncPage[ModelInfo].model_validate_json(model_list([CARD]))
    assert (page.first_id, page.last_id, page.has_more) == ("org/name", "org/name", False)
    assert SyncPage[ModelInfo].model_validate_json(model_list([])).last_id is None
