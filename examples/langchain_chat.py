"""Use the server from LangChain. Needs `pip install langchain-openai`."""

import os

from langchain_openai import ChatOpenAI

url = os.environ.get("BATON_URL", "http://127.0.0.1:8000")
chat = ChatOpenAI(
    base_url=f"{url}/v1",
    api_key=os.environ.get("BATON_API_KEY", "none"),
    model=os.environ.get("BATON_MODEL", "demo"),
    max_tokens=64,
)
print(chat.invoke("What is 17 + 25?").content)
