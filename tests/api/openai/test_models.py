import json

from openai.pagination import SyncPage
from openai.types import Model

from penstock.api.openai import ModelCard, model_list, model_object

CARD = ModelCard(id="org/name", created=1_700_000_000, max_model_len=2048)


def test_a_model_is_what_the_client_expects() -> None:
    model = Model.model_validate_json(model_object(CARD))
    assert (model.id, model.object, model.owned_by) == ("org/name", "model", "penstock")


def test_the_list_is_what_the_client_expects() -> None:
    page = SyncPage[Model].model_validate_json(model_list([CARD]))
    assert page.object == "list"
    assert [model.id for model in page.data] == ["org/name"]
    assert json.loads(model_list([CARD]))["data"][0]["max_model_len"] == 2048
