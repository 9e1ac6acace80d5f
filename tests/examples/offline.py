"""What people do with vLLM offline, with another import and model: chat, forms, tools, caching."""

import json
from enum import Enum

from baton import LLM, SamplingParams, StructuredOutputsParams

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "size": {"enum": [1, 2]},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather in a given location",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


class Mood(Enum):
    positive = "Positive"
    negative = "Negative"


def chat(llm: LLM) -> None:
    sampling_params = llm.get_default_sampling_params().clone(
        max_tokens=24, temperature=0
    )
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": [{"type": "text", "text": "What is 17 + 25?"}]},
    ]
    outputs = llm.chat(conversation, sampling_params=sampling_params, use_tqdm=False)
    outputs += llm.chat(
        [conversation] * 3,
        sampling_params,
        use_tqdm=True,
        tools=[WEATHER],
        chat_template_kwargs={"enable_thinking": False},
    )
    for output in outputs:
        print(f"Prompt: {output.prompt!r}\nGenerated text: {output.outputs[0].text!r}")
    assert len(outputs) == 4


def structured_outputs(llm: LLM) -> None:
    forms = (
        StructuredOutputsParams(choice=[mood.value for mood in Mood]),
        StructuredOutputsParams(regex=r"\w{1,9}@\w{1,9}\.com\n"),
        StructuredOutputsParams(json=CITY),
        StructuredOutputsParams(
            grammar='root ::= "SELECT " ("name" | "size") " FROM city"'
        ),
    )
    params = [
        SamplingParams(
            structured_outputs=form,
            stop=["\n"] if form.regex else None,
            max_tokens=80,
            seed=1,
        )
        for form in forms
    ]
    outputs = llm.generate(["Answer: "] * len(params), sampling_params=params)
    mood, mail, city, query = (output.outputs[0].text for output in outputs)
    assert Mood(mood)
    assert mail.endswith(".com")
    assert json.loads(city).keys() == {"name", "size"}
    assert query.startswith("SELECT ")
    print("forms:", mood, mail, city, query)


def prefix_caching(llm: LLM) -> None:
    prefix = (
        "You are an expert school principal, skilled in managing faculty and staff. "
        * 3
    )
    prompts = [
        prefix + question for question in ("Hello, my name is", "The capital is")
    ]
    sampling_params = SamplingParams(temperature=0.0, max_tokens=9, logprobs=1)
    llm.reset_prefix_cache()
    regular = llm.generate(prompts[:1], sampling_params)
    cached = llm.generate({"prompt": prompts[0]}, sampling_params)
    token_ids = llm.get_tokenizer().encode(prompts[0])
    assert cached[0].prompt_token_ids == token_ids
    assert cached[0].outputs[0].token_ids == regular[0].outputs[0].token_ids
    assert (
        cached[0].outputs[0].cumulative_logprob
        == regular[0].outputs[0].cumulative_logprob
    )
    assert llm.reset_prefix_cache()
    (again,) = llm.generate(
        [{"prompt_token_ids": token_ids}], sampling_params, use_tqdm=False
    )
    assert again.finished
    print(
        "cached tokens:", *(one.num_cached_tokens for one in (*regular, *cached, again))
    )


if __name__ == "__main__":
    llm = LLM(model="", enable_prefix_caching=True, gpu_memory_utilization=0.4)
    chat(llm)
    structured_outputs(llm)
    prefix_caching(llm)
