"""Samples a model with vLLM alone: ``sample.py <model> <parquet file> <jsonl file for 4 samples of each prompt>``."""

import json
import sys

import pyarrow.parquet as pq

from verl_ext.launch import collect_rarely, export_environment


def main(model: str, data: str, out: str) -> None:
    from vllm import LLM, SamplingParams

    prompts = [row["prompt"] for row in pq.read_table(data, columns=["prompt"]).to_pylist()]
    engine = LLM(model, max_model_len=128, kv_cache_memory_bytes=2**26, enforce_eager=True)
    texts = engine.get_tokenizer().apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
    answers = engine.generate(texts, SamplingParams(n=4, temperature=1.0, max_tokens=24))
    with open(out, "w") as file:
        for answer in answers:
            for sample in answer.outputs:
                print(json.dumps({"input": answer.prompt, "output": sample.text}), file=file)


if __name__ == "__main__":  # vLLM's engine is a process that imports this file again
    collect_rarely()
    export_environment("cpu")
    main(*sys.argv[1:])
