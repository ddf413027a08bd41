"""tiercache under a real vLLM: the demo (`make demo-vllm`) and the measurements (`make bench-vllm`).

Runs in the environment that `tests/vllm/vllm_venv.py` builds.
"""
