"""Get an answer that fits a JSON schema, whatever the model would like to say."""

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel


class Sum(BaseModel):
    first: int
    second: int
    is_even: bool
    confidence: Literal["low", "high"]


url = os.environ.get("BATON_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("BATON_API_KEY", "none"))
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "What is 17 + 25?"}],
    response_format={
        "type": "json_schema",
        "json_schema": {"name": "sum", "schema": Sum.model_json_schema()},
    },
    max_tokens=256,
)
print(answer.choices[0].finish_reason, answer.choices[0].message.content)
