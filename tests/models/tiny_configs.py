"""Configs of the smallest model of each kind with every part."""

from __future__ import annotations

from asr_serve.models.asr import deepspeech
from asr_serve.models.asr.moonshine import moonshine, moonshine_streaming
from asr_serve.models.asr.moonshine.window_encoder import WindowEncoderConfig
from asr_serve.models.asr.nemo import fastconformer
from asr_serve.models.asr.wenet import u2pp
from asr_serve.models.asr.whisper import whisper
from asr_serve.models.tts.vocoders import hifigan, source_filter


def deepspeech_config() -> deepspeech.Config:
    return deepspeech.Config(vocab_size=7, hidden_size=24, cell_size=16, context_frames=2, mels=20, coefficients=6)


def u2pp_config() -> u2pp.Config:
    return u2pp.Config(
        vocab=23,
        sos=22,
        eos=22,
        mels=20,
        width=16,
        heads=2,
        inner=24,
        layers=2,
        kernel=5,
        decoder_heads=2,
        decoder_inner=24,
        decoder_layers=1,
        reverse_layers=2,
        chunk=4,
        left_chunks=2,
    )


def moonshine_config() -> moonshine.Config:
    return moonshine.Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        max_position_embeddings=64,
    )


def moonshine_streaming_config() -> moonshine_streaming.Config:
    """Encoder and decoder differ in width and heads."""
    return moonshine_streaming.Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        partial_rotary_factor=0.9,
        encoder_config=WindowEncoderConfig(
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=4,
            num_attention_heads=2,
            head_dim=8,
            sliding_windows=((5, 3), (6, 0), (4, 2), (3, 4)),
        ),
    )


def whisper_config() -> whisper.Config:
    """2 s windows, 64 text tokens, two languages."""
    return whisper.Config(
        vocab_size=64 + 2 + 2 + 6 + 101,
        num_mel_bins=80,
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        max_source_positions=100,
        max_target_positions=64,
        eos_token_id=64,
    )


def fastconformer_config() -> fastconformer.Config:
    return fastconformer.Config(
        feat_in=16,
        d_model=32,
        n_layers=2,
        n_heads=4,
        ff_expansion_factor=2,
        subsampling_conv_channels=8,
        conv_kernel_size=5,
        att_context_size=((8, 1), (8, 3), (8, 0)),
        vocab_size=48,
        pred_hidden=24,
        joint_hidden=20,
    )


def source_filter_config() -> source_filter.Config:
    return source_filter.Config(width=16, inner=24, blocks=2, kernel=3)


def hifigan_config() -> hifigan.Config:
    return hifigan.Config(
        num_mels=80,
        upsample_rates=(8, 4, 4, 2),
        upsample_kernel_sizes=(16, 8, 8, 4),
        upsample_initial_channel=32,
        resblock_kernel_sizes=(3, 5),
        resblock_dilation_sizes=((1, 2), (1, 3)),
    )
