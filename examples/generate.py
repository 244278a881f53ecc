"""Generate with DeepSeek-V4 in transformers, through this cache.

python examples/generate.py CHECKPOINT_FOLDER [PROMPT ...]

The three lines marked are all that differs from a script without this cache.
"""

import sys

import torch
from transformers import AutoTokenizer, DeepseekV4ForCausalLM

from dsv4.integrations.transformers import attach  # 1

path, *prompts = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
model = DeepseekV4ForCausalLM.from_pretrained(path, dtype="auto").to(device)
cache = attach(model, max_requests=8, max_tokens=4096)  # 2

texts = prompts or ["The capital of France is", "Two and two is"]
inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
ids = model.generate(**inputs.to(device), max_new_tokens=32, past_key_values=cache)  # 3
for text in tokenizer.batch_decode(ids, skip_special_tokens=True):
    print(text)
