from penstock.core.model_config import ModelConfig

SMOLLM2 = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    context_length=8192,
    tied_embeddings=True,
)


def test_the_shape_tells_parameters_and_cache_size() -> None:
    assert SMOLLM2.num_parameters == 134_515_008
    assert SMOLLM2.kv_bytes_per_token(2) == 23_040
