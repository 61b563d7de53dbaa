"""Whether the fakes are faithful: the engines' own clients get on with them."""

from __future__ import annotations

import openai
import pytest

from tests.dialects.servers import WORDS, FakeServer, FakeSglang, FakeTgi, FakeTrtllm, FakeVllm
from tests.sdk import Unverified


def test_hugging_faces_client_gets_on_with_the_fake_of_tgi() -> None:
    from huggingface_hub import InferenceClient  # which takes 0.2 s

    with FakeTgi() as fake:
        client = InferenceClient(fake.url)
        whole = client.text_generation("Hi", max_new_tokens=3, details=True)
        assert whole.generated_text == "".join(WORDS[:3])
        assert whole.details is not None
        assert whole.details.generated_tokens == 3
        assert list(client.text_generation("Hi", stream=True)) == WORDS
        said = client.chat_completion([{"role": "user", "content": "Hi"}], model="tgi", max_tokens=3)
        assert said.choices[0].message.content == "".join(WORDS[:3])
        assert said.usage.completion_tokens == 3
        chunks = client.chat_completion([{"role": "user", "content": "Hi"}], model="tgi", stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "".join(WORDS)


@pytest.mark.parametrize("kind", [FakeVllm, FakeSglang, FakeTrtllm, FakeTgi], ids=lambda kind: kind.__name__)
def test_openais_client_gets_on_with_those_that_speak_openai(kind: type[FakeServer]) -> None:
    with kind() as fake:
        client = openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0, http_client=Unverified())
        said = client.chat.completions.create(model="tgi", messages=[{"role": "user", "content": "Hi"}], max_tokens=3)
        assert said.choices[0].message.content == "".join(WORDS[:3])
        stream = client.completions.create(model="tgi", prompt="Hi", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "".join(WORDS)
