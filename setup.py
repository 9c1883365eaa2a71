"""Installs `speculative`: pip install -e ."""
import setuptools

setuptools.setup(
    name='speculative',
    version='0.1.0',
    description='Speculative decoding (Leviathan et al., ICML 2023) in JAX/Flax: exact, batched, one jit.',
    license='Apache-2.0',
    packages=setuptools.find_packages(include=['speculative*', 'experiments*']),
    package_data={'speculative': ['pretrained/*', 'pretrained/*/*', 'report/*.html', 'report/*.json']},
    python_requires='>=3.11',
    install_requires=[
        'absl-py', 'flax', 'gin-config', 'huggingface-hub', 'jax', 'jinja2', 'matplotlib', 'numpy', 'optax',
        'orbax-checkpoint', 'rich', 'rouge-score', 'sacrebleu', 'safetensors', 'sentencepiece', 'tensorstore'],
    extras_require={
        'seqio': ['importlib-resources', 'seqio', 't5'],  # the first is TFDS's, to prepare data; it forgets it
        't5x': ['t5x @ git+https://github.com/google-research/t5x'],
        'tpu': ['jax[tpu]'],
        'gpu': ['jax[cuda13]'],
        'tokenizers': ['tokenizers'],
        'notebooks': ['ipykernel', 'nbclient', 'nbformat'],
        'test': ['hypothesis', 'pytest', 'pytest-xdist', 'tokenizers'],
    },
)
