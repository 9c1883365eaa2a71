"""Speculative decoding (Leviathan et al., ICML 2023) in JAX.

The life of a request:

  text → `data.vocabulary`, `data.batching`: a token batch, padded to one of few lengths
       → `decoding.speculative.prefill`: encoder once, cross-attention keys and values once, caches allocated
       → `decoding.speculative.run`: one `lax.while_loop` of rounds, each: the drafter draws γ tokens (`drafters`), the
         target gives their probabilities in one call (`models`), `algorithm` accepts and replaces, tokens are committed
       → `DecodeResult` → text, α (`measure`), wall time, report (`report`).

Start reading at `algorithm.py`: Algorithm 1 of the paper; then `decoding/speculative.py`: the loop around it.
"""
from speculative.checkpoints import load_model
from speculative.checkpoints import save_model
from speculative.data.packaged import load_pretrained
from speculative.decoding.adaptive import AdaptiveGamma
from speculative.decoding.adaptive import adaptive_decode
from speculative.decoding.autoregressive import autoregressive_decode
from speculative.decoding.beam import BeamResult
from speculative.decoding.beam import beam_decode
from speculative.decoding.config import DecodeConfig
from speculative.decoding.speculative import lay_out
from speculative.decoding.speculative import speculative_decode
from speculative.decoding.state import DecodeResult
from speculative.decoding.state import FinishReason
from speculative.models.model import Model
from speculative.text import generate
from speculative.text import stream

__all__ = ['AdaptiveGamma', 'BeamResult', 'DecodeConfig', 'DecodeResult', 'FinishReason', 'Model', 'adaptive_decode',
           'autoregressive_decode', 'beam_decode', 'generate', 'lay_out', 'load_model', 'load_pretrained', 'save_model',
           'speculative_decode', 'stream']
