# ruff: noqa: I001
"""Names that a plugin may import, and their modules: read by type checkers and, at run time, by `plugin.py`.

One import a line; the sections are those of docs/plugin-names.md.
"""

# Architectures
from llamacli.architecture import Architecture as Architecture
from llamacli.architecture import Config as Config
from llamacli.architecture import BlockHeadArchitecture as BlockHeadArchitecture
from llamacli.architecture import CacheHeadArchitecture as CacheHeadArchitecture
from llamacli.architecture import HeadArchitecture as HeadArchitecture
from llamacli.tensor_table import Params as Params
from llamacli.tensor_table import TensorTable as TensorTable
from llamacli.tensor_table import Weights as Weights
from llamacli.architecture import sliding_layers as sliding_layers
from llamacli.gguf import Metadata as Metadata
from llamacli.graph import Graph as Graph
from llamacli.graph import KeyValues as KeyValues
from llamacli.graph import Param as Param
from llamacli.graph import Tensor as Tensor
from llamacli.graph import Value as Value
from llamacli.hookspecs import hookimpl as hookimpl
from llamacli.ops.moe import Scoring as Scoring
from llamacli.ops.rope import Rope as Rope

# Errors
from llamacli.errors import InvalidRequestError as InvalidRequestError
from llamacli.errors import MediaError as MediaError
from llamacli.errors import ModelFormatError as ModelFormatError
from llamacli.errors import PluginError as PluginError
from llamacli.errors import TokenizerError as TokenizerError

# Activations
from llamacli.ops.activations import Activation as Activation
from llamacli.ops.activations import exp as exp
from llamacli.ops.activations import gelu as gelu
from llamacli.ops.activations import gelu_erf as gelu_erf
from llamacli.ops.activations import gelu_quick as gelu_quick
from llamacli.ops.activations import relu as relu
from llamacli.ops.activations import identity as identity
from llamacli.ops.activations import never as never
from llamacli.ops.activations import relu_squared as relu_squared
from llamacli.ops.activations import sigmoid as sigmoid
from llamacli.ops.activations import silu as silu
from llamacli.ops.activations import softplus as softplus
from llamacli.ops.activations import swiglu_clamped as swiglu_clamped
from llamacli.ops.activations import swiglu_late_clamped as swiglu_late_clamped
from llamacli.ops.activations import tanh as tanh

# Blocks that several families share
from llamacli.blocks.classifier import add_classifier as add_classifier
from llamacli.blocks.classifier import classifier_scores as classifier_scores
from llamacli.blocks.decoder import Decoder as Decoder
from llamacli.blocks.decoder import DecoderConfig as DecoderConfig
from llamacli.blocks.mixture import SHARED as SHARED
from llamacli.blocks.mixture import Mixture as Mixture
from llamacli.blocks.mixture import add_experts as add_experts
from llamacli.blocks.mixture import add_network as add_network
from llamacli.blocks.mixture import expert_groups as expert_groups
from llamacli.blocks.mixture import expert_options as expert_options
from llamacli.blocks.mixture import experts as experts
from llamacli.blocks.mixture import experts_and_shared as experts_and_shared
from llamacli.blocks.mixture import network as network
from llamacli.blocks.mrope import read_mrope as read_mrope
from llamacli.blocks.nextn import add_nextn as add_nextn
from llamacli.blocks.nextn import nextn_input as nextn_input
from llamacli.blocks.nextn import nextn_logits as nextn_logits
from llamacli.blocks.state_space import Duality as Duality
from llamacli.blocks.state_space import SelectiveScan as SelectiveScan

# Hugging Face checkpoints
from llamacli.checkpoints.factors import head_dim as head_dim
from llamacli.checkpoints.factors import n_blocks as n_blocks
from llamacli.checkpoints.factors import wavelength_factors as wavelength_factors
from llamacli.checkpoints.keys import rope_of as rope_of
from llamacli.checkpoints.layout import DRAFT_TOKENS as DRAFT_TOKENS
from llamacli.checkpoints.layout import INTERLEAVED as INTERLEAVED
from llamacli.checkpoints.layout import MINUS_EXP as MINUS_EXP
from llamacli.checkpoints.layout import PLUS_ONE as PLUS_ONE
from llamacli.checkpoints.layout import SQUEEZED as SQUEEZED
from llamacli.checkpoints.layout import TRANSPOSED as TRANSPOSED
from llamacli.checkpoints.layout import Checkpoint as Checkpoint
from llamacli.checkpoints.layout import Conversion as Conversion
from llamacli.checkpoints.layout import Settings as Settings
from llamacli.checkpoints.layout import field as field
from llamacli.checkpoints.layout import state_space as state_space
from llamacli.gguf.tokens import BYTE_OF_CHAR as BYTE_OF_CHAR
from llamacli.gguf.tokens import TokenKind as TokenKind

# Media encoders
from llamacli.blocks.sound import SoundConfig as SoundConfig
from llamacli.blocks.sound import sound_layers as sound_layers
from llamacli.blocks.sound import sound_tower as sound_tower
from llamacli.blocks.sound import whisper as whisper
from llamacli.blocks.sound import whisper_tensors as whisper_tensors
from llamacli.blocks.vision import VisionConfig as VisionConfig
from llamacli.blocks.vision import bounded as bounded
from llamacli.blocks.vision import mlp as mlp
from llamacli.blocks.vision import vision_layers as vision_layers
from llamacli.blocks.vision import vision_tensors as vision_tensors
from llamacli.blocks.vision import vision_tower as vision_tower
from llamacli.loaders import ModelFile as ModelFile
from llamacli.media.encoder import MediaEncoder as MediaEncoder
from llamacli.media.encoder import SoundEncoder as SoundEncoder
from llamacli.media.pictures import Pixels as Pixels
from llamacli.media.pictures import fitting as fitting
from llamacli.media.pictures import padded as padded
from llamacli.media.pictures import resized as resized
from llamacli.media.pictures import tiled as tiled
from llamacli.media.sound import SAMPLE_RATE as SAMPLE_RATE
from llamacli.media.sound import Mel as Mel
from llamacli.media.sound import Samples as Samples
from llamacli.media.sound import log_mel as log_mel

# Verbs
from llamacli.ops.base import MakeParam as MakeParam
from llamacli.ops.base import Op as Op
from llamacli.ops.base import Recorder as Recorder
from llamacli.ops.base import expect as expect
from llamacli.ops.base import expect_number as expect_number
from llamacli.ops.cached import CacheOp as CacheOp
from llamacli.ops.columns import columns as columns
from llamacli.ops.key_shift import KeyShift as KeyShift
from llamacli.ops.lanewise import Lanewise as Lanewise
from llamacli.ops.lanewise import Vocabulary as Vocabulary
from llamacli.ops.lanewise import lower_lanewise as lower_lanewise
from llamacli.ops.linear import linear as linear
from llamacli.ops.linear import lower_linear as lower_linear
from llamacli.ops.lowering import Lowering as Lowering
from llamacli.ops.lowering import f32 as f32
from llamacli.ops.norms import lower_norm as lower_norm
from llamacli.ops.recurrent import StateOp as StateOp
from llamacli.ops.run import Run as Run
from llamacli.ops.values import Array as Array

# Kernels
from llamacli.kernels.api import Kernel as Kernel
from llamacli.kernels.api import carray as carray
from llamacli.kernels.api import njit as njit
from llamacli.kernels.api import pointer as pointer
from llamacli.kernels.api import rows_of as rows_of
from llamacli.kernels.api import share as share
from llamacli.kernels.api import simd as simd
from llamacli.kernels.api import state_kernel as state_kernel
from llamacli.kernels.cached import cache_kernel as cache_kernel
from llamacli.kernels.layout import ACTIVATION_BLOCK as ACTIVATION_BLOCK
from llamacli.kernels.layout import CACHE_FIELDS as CACHE_FIELDS
from llamacli.kernels.layout import LANES as LANES
from llamacli.kernels.layout import ROW as ROW
from llamacli.kernels.layout import RUN as RUN
from llamacli.kernels.layout import STATE_FIELDS as STATE_FIELDS
from llamacli.kernels.layout import record as record

# Tensor types
from llamacli.kernels.ggml_packings import F16 as F16
from llamacli.kernels.ggml_packings import F32 as F32
from llamacli.kernels.ggml_packings import I8 as I8
from llamacli.kernels.ggml_packings import U8 as U8
from llamacli.kernels.packing_formats import IntegerPacking as IntegerPacking
from llamacli.quantization import QuantFormat as QuantFormat

# Files
from llamacli.loaders import ArrayFile as ArrayFile
from llamacli.loaders import Loader as Loader

# Tokenizers
from llamacli.tokenizer.loading import NamedPreTokenizer as NamedPreTokenizer
from llamacli.tokenizer.loading import TokenizerModel as TokenizerModel
from llamacli.tokenizer.loading import TokenizerParts as TokenizerParts
from llamacli.tokenizer.pretokenizers import PreTokenizer as PreTokenizer
from llamacli.tokenizer.vocabulary import read_vocabulary as read_vocabulary

# Samplers
from llamacli.sampling import Candidates as Candidates
from llamacli.sampling import Sampler as Sampler
from llamacli.sampling import SamplerType as SamplerType

# Chat formats
from llamacli.chat.call_text import CallReading as CallReading
from llamacli.chat.call_text import CallText as CallText
from llamacli.chat.call_text import IncompleteCallError as IncompleteCallError
from llamacli.chat.calls import JsonCall as JsonCall
from llamacli.chat.calls import NamedCall as NamedCall
from llamacli.chat.calls import Notation as Notation
from llamacli.chat.calls import Schemas as Schemas
from llamacli.chat.calls import json_calls as json_calls
from llamacli.chat.calls import tagged_calls as tagged_calls
from llamacli.chat.channels import HARMONY as HARMONY
from llamacli.chat.formats import ChatFormat as ChatFormat
from llamacli.chat.formats import TemplateInfo as TemplateInfo
from llamacli.chat.literals import Literals as Literals
from llamacli.chat.messages import Piece as Piece
from llamacli.chat.messages import ToolCall as ToolCall
from llamacli.chat.rules import CALL_SPACE as CALL_SPACE
from llamacli.chat.rules import Rules as Rules
from llamacli.chat.rules import literal as literal
from llamacli.chat.syntax import HERMES as HERMES
from llamacli.chat.syntax import THINK as THINK
from llamacli.chat.syntax import THINKING as THINKING
from llamacli.chat.syntax import Calls as Calls
from llamacli.chat.syntax import Reader as Reader
from llamacli.chat.syntax import Span as Span
from llamacli.chat.syntax import Spans as Spans
from llamacli.chat.syntax import Syntax as Syntax
from llamacli.chat.tags import Pairs as Pairs
