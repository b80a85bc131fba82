"""Public names of llamacli and their modules, read by type checkers and, at run time, by `__init__.py`.

One import a line: `from module import Name as Name`.
"""

from llamacli.architecture import Architecture as Architecture
from llamacli.architecture import Config as Config
from llamacli.architecture import TensorTable as TensorTable
from llamacli.architecture import Weights as Weights
from llamacli.chat.messages import Message as Message
from llamacli.chat.messages import Piece as Piece
from llamacli.chat.messages import ToolCall as ToolCall
from llamacli.chat.session import ChatSession as ChatSession
from llamacli.engine import QuantMode as QuantMode
from llamacli.engine.adapters import Adapter as Adapter
from llamacli.errors import CacheFull as CacheFull
from llamacli.errors import ChatTemplateError as ChatTemplateError
from llamacli.errors import ClosedError as ClosedError
from llamacli.errors import ContextOverflowError as ContextOverflowError
from llamacli.errors import EmbeddingModelError as EmbeddingModelError
from llamacli.errors import GrammarError as GrammarError
from llamacli.errors import HubError as HubError
from llamacli.errors import InvalidRequestError as InvalidRequestError
from llamacli.errors import LlamaCliError as LlamaCliError
from llamacli.errors import ModelFormatError as ModelFormatError
from llamacli.errors import ModelNotFoundError as ModelNotFoundError
from llamacli.errors import OutOfMemoryError as OutOfMemoryError
from llamacli.errors import PluginError as PluginError
from llamacli.errors import SessionBusyError as SessionBusyError
from llamacli.errors import StateError as StateError
from llamacli.errors import TokenizerError as TokenizerError
from llamacli.errors import UnknownArchitectureError as UnknownArchitectureError
from llamacli.generation.drafters import DraftModel as DraftModel
from llamacli.generation.drafters import MtpHead as MtpHead
from llamacli.generation.drafters import PromptLookup as PromptLookup
from llamacli.generation.loop import Generated as Generated
from llamacli.generation.loop import Stats as Stats
from llamacli.generation.stream import TokenStream as TokenStream
from llamacli.generation.stream import eval_batch as eval_batch
from llamacli.generation.text import Token as Token
from llamacli.graph import Activation as Activation
from llamacli.graph import Graph as Graph
from llamacli.graph import Value as Value
from llamacli.hookspecs import hookimpl as hookimpl
from llamacli.inputs import Inputs as Inputs
from llamacli.loaders import ArrayFile as ArrayFile
from llamacli.loaders import Loader as Loader
from llamacli.model import Model as Model
from llamacli.model import load_model as load_model
from llamacli.model import load_tokenizer as load_tokenizer
from llamacli.ops.rope import Rope as Rope
from llamacli.sampling import SamplingParams as SamplingParams
from llamacli.session import Session as Session
from llamacli.tokenizer import Tokenizer as Tokenizer
from llamacli.tools.demo import demo_path as demo_path
from llamacli.tools.diffusion import fill_masks as fill_masks
from llamacli.tools.embedding import Embedder as Embedder
from llamacli.tools.embedding import load_embedder as load_embedder
