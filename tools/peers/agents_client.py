"""An application on OpenAI's Agents SDK, against the server that is named: prints one JSON object.

It runs in the environment that `install.py` makes for `agents`, so it knows nothing of penstock.
"""

from __future__ import annotations

import asyncio
import json
import sys

from agents import (  # type: ignore[import-not-found]
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

SETTINGS = {"temperature": 0, "max_tokens": 1000}


class Color(BaseModel):
    color: str


@function_tool  # type: ignore[untyped-decorator]
def weather(city: str) -> str:
    """The weather in a city."""
    return f"It rains in {city}."


async def main(url: str, model_name: str) -> dict[str, object]:
    set_tracing_disabled(True)
    model = OpenAIResponsesModel(model=model_name, openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key="none"))

    def agent(**options: object) -> Agent:
        settings = ModelSettings(**SETTINGS, **options.pop("settings", {}))
        return Agent(name="agent", instructions="Be brief.", model=model, model_settings=settings, **options)

    capital = await Runner.run(agent(), "What is the capital of France?")
    again = await Runner.run(agent(), [*capital.to_input_list(), {"role": "user", "content": "And of Italy?"}])
    streamed = Runner.run_streamed(agent(), "What is the capital of France?")
    num_events = len([event async for event in streamed.stream_events()])
    session = SQLiteSession("one")
    await Runner.run(agent(), "What is the capital of France?", session=session)
    remembered = await Runner.run(agent(), "And of Italy?", session=session)
    forced = agent(tools=[weather], settings={"tool_choice": "required"})
    used = await Runner.run(forced, "How is the weather in Paris?", max_turns=3)
    color = await Runner.run(agent(output_type=Color), "Name a color.")
    return {
        "capital": capital.final_output,
        "again": again.final_output,
        "streamed": streamed.final_output,
        "num_events": num_events,
        "remembered": remembered.final_output,
        "tool_items": [type(item).__name__ for item in used.new_items],
        "tool_output": next(item.output for item in used.new_items if type(item).__name__ == "ToolCallOutputItem"),
        "color": type(color.final_output).__name__,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:3]))))
