"""Let the model call a function, and give it the result."""

import json
import os

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "population",
        "description": "Return how many people live in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}
url = os.environ.get("BATON_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("BATON_API_KEY", "none"))
model = client.models.list().data[0].id
turns = [{"role": "user", "content": "How many people live in Lima?"}]

# `required` asks for a call; with `auto`, the model decides.
asked = client.chat.completions.create(
    model=model, messages=turns, tools=[TOOL], tool_choice="required", max_tokens=128
)
message = asked.choices[0].message
turns.append(message.model_dump(exclude_none=True))
for call in message.tool_calls or []:
    print(call.function.name, call.function.arguments)
    result = json.dumps({"people": 10_000_000})
    turns.append({"role": "tool", "tool_call_id": call.id, "content": result})
answer = client.chat.completions.create(
    model=model, messages=turns, tools=[TOOL], max_tokens=64
)
print(answer.choices[0].message.content)
