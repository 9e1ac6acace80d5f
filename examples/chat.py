"""Ask a chat, whole and as a stream."""

import os

from openai import OpenAI

url = os.environ.get("BATON_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("BATON_API_KEY", "none"))
model = client.models.list().data[0].id
turns = [{"role": "user", "content": "What is 17 + 25?"}]

answer = client.chat.completions.create(model=model, messages=turns, max_tokens=64)
print(answer.choices[0].message.content)

for chunk in client.chat.completions.create(
    model=model, messages=turns, max_tokens=64, stream=True
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
