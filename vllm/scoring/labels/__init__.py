"""`vllm score`: how likely is each label to come next?"""
