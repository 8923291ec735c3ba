from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Operation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_UNSPECIFIED: _ClassVar[Operation]
    INITIALIZE: _ClassVar[Operation]
    RESTORE: _ClassVar[Operation]
    PREFILL: _ClassVar[Operation]
    SCORED_PREFILL: _ClassVar[Operation]
    RESUME: _ClassVar[Operation]
    DECODE: _ClassVar[Operation]
    SPECULATIVE: _ClassVar[Operation]
    MIXED: _ClassVar[Operation]
    SNAPSHOT: _ClassVar[Operation]

class Source(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_UNSPECIFIED: _ClassVar[Source]
    SLOT: _ClassVar[Source]
    GENERATION: _ClassVar[Source]
    LIVE_ROWS: _ClassVar[Source]
    QUERY_LENGTH: _ClassVar[Source]
    PREFIX_LIMIT: _ClassVar[Source]
    SAMPLES_THIS_STEP: _ClassVar[Source]
    MIXED_PREFILL_ROW: _ClassVar[Source]
    PROMPT_TOKENS: _ClassVar[Source]
    SCORE_TARGETS: _ClassVar[Source]
    PENDING_TOKEN: _ClassVar[Source]
    POSITIONS: _ClassVar[Source]
    PAGE_TABLE: _ClassVar[Source]
    STATE_ROW: _ClassVar[Source]
    RESTORE_ROW: _ClassVar[Source]
    SNAPSHOT_ROW: _ClassVar[Source]
    CONSUMED: _ClassVar[Source]
    SEED: _ClassVar[Source]
    TEMPERATURE: _ClassVar[Source]
    TOP_K: _ClassVar[Source]
    TOP_P: _ClassVar[Source]
    MIN_P: _ClassVar[Source]
    REPEAT_PENALTY: _ClassVar[Source]
    OUTPUT_LIMIT: _ClassVar[Source]
    EOS_IDS: _ClassVar[Source]
    PROMPT_HISTOGRAM: _ClassVar[Source]
    GRAMMAR_MASK: _ClassVar[Source]
    COPIED_IDS: _ClassVar[Source]
    COPIED_COUNT: _ClassVar[Source]
    COPIED_MASKS: _ClassVar[Source]
    COPIED_GENERATION: _ClassVar[Source]
    COPIED_CONSUMED: _ClassVar[Source]
    CONSTANT: _ClassVar[Source]
    OUTPUT_ROWS: _ClassVar[Source]

class Indexing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INDEXING_UNSPECIFIED: _ClassVar[Indexing]
    SCALAR: _ClassVar[Indexing]
    SUBMISSION_ROW: _ClassVar[Indexing]
    ACTIVE_ROW: _ClassVar[Indexing]
    PHYSICAL_ROW: _ClassVar[Indexing]
    PACKED_TOKEN: _ClassVar[Indexing]

class HistoryKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HISTORY_UNSPECIFIED: _ClassVar[HistoryKind]
    PAGED_KV: _ClassVar[HistoryKind]
    PAGED_LATENT: _ClassVar[HistoryKind]
    SLIDING_WINDOW: _ClassVar[HistoryKind]
    RECURRENT: _ClassVar[HistoryKind]
    CONTINUATION: _ClassVar[HistoryKind]

class ToolSyntax(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_UNSPECIFIED: _ClassVar[ToolSyntax]
    TOOL_FUNCTION_TAGS: _ClassVar[ToolSyntax]
    TOOL_ARGUMENT_TAGS: _ClassVar[ToolSyntax]
    TOOL_DSML: _ClassVar[ToolSyntax]
    TOOL_XTML: _ClassVar[ToolSyntax]
    TOOL_RECIPIENT_ATEM: _ClassVar[ToolSyntax]
    TOOL_TAGGED_JSON: _ClassVar[ToolSyntax]
    TOOL_BARE_JSON: _ClassVar[ToolSyntax]
    TOOL_BRACKET_JSON: _ClassVar[ToolSyntax]
    TOOL_HARMONY: _ClassVar[ToolSyntax]

class ReasoningSyntax(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASONING_UNSPECIFIED: _ClassVar[ReasoningSyntax]
    REASONING_THINK_TAGS: _ClassVar[ReasoningSyntax]
    REASONING_XTML_THINK: _ClassVar[ReasoningSyntax]
    REASONING_RECIPIENT_HEADER: _ClassVar[ReasoningSyntax]
    REASONING_HARMONY: _ClassVar[ReasoningSyntax]

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    I32: _ClassVar[DType]
    I64: _ClassVar[DType]
    U32: _ClassVar[DType]
    U64: _ClassVar[DType]
    F32: _ClassVar[DType]
    F16: _ClassVar[DType]
    BF16: _ClassVar[DType]
    U8: _ClassVar[DType]
    GGML_BLOCKS: _ClassVar[DType]

class Space(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPACE_UNSPECIFIED: _ClassVar[Space]
    WEIGHT: _ClassVar[Space]
    PERSISTENT: _ClassVar[Space]
    CACHE: _ClassVar[Space]
    SCRATCH: _ClassVar[Space]
    TRANSPORT: _ClassVar[Space]

class Access(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCESS_UNSPECIFIED: _ClassVar[Access]
    READ: _ClassVar[Access]
    WRITE: _ClassVar[Access]
    READ_WRITE: _ClassVar[Access]
OPERATION_UNSPECIFIED: Operation
INITIALIZE: Operation
RESTORE: Operation
PREFILL: Operation
SCORED_PREFILL: Operation
RESUME: Operation
DECODE: Operation
SPECULATIVE: Operation
MIXED: Operation
SNAPSHOT: Operation
SOURCE_UNSPECIFIED: Source
SLOT: Source
GENERATION: Source
LIVE_ROWS: Source
QUERY_LENGTH: Source
PREFIX_LIMIT: Source
SAMPLES_THIS_STEP: Source
MIXED_PREFILL_ROW: Source
PROMPT_TOKENS: Source
SCORE_TARGETS: Source
PENDING_TOKEN: Source
POSITIONS: Source
PAGE_TABLE: Source
STATE_ROW: Source
RESTORE_ROW: Source
SNAPSHOT_ROW: Source
CONSUMED: Source
SEED: Source
TEMPERATURE: Source
TOP_K: Source
TOP_P: Source
MIN_P: Source
REPEAT_PENALTY: Source
OUTPUT_LIMIT: Source
EOS_IDS: Source
PROMPT_HISTOGRAM: Source
GRAMMAR_MASK: Source
COPIED_IDS: Source
COPIED_COUNT: Source
COPIED_MASKS: Source
COPIED_GENERATION: Source
COPIED_CONSUMED: Source
CONSTANT: Source
OUTPUT_ROWS: Source
INDEXING_UNSPECIFIED: Indexing
SCALAR: Indexing
SUBMISSION_ROW: Indexing
ACTIVE_ROW: Indexing
PHYSICAL_ROW: Indexing
PACKED_TOKEN: Indexing
HISTORY_UNSPECIFIED: HistoryKind
PAGED_KV: HistoryKind
PAGED_LATENT: HistoryKind
SLIDING_WINDOW: HistoryKind
RECURRENT: HistoryKind
CONTINUATION: HistoryKind
TOOL_UNSPECIFIED: ToolSyntax
TOOL_FUNCTION_TAGS: ToolSyntax
TOOL_ARGUMENT_TAGS: ToolSyntax
TOOL_DSML: ToolSyntax
TOOL_XTML: ToolSyntax
TOOL_RECIPIENT_ATEM: ToolSyntax
TOOL_TAGGED_JSON: ToolSyntax
TOOL_BARE_JSON: ToolSyntax
TOOL_BRACKET_JSON: ToolSyntax
TOOL_HARMONY: ToolSyntax
REASONING_UNSPECIFIED: ReasoningSyntax
REASONING_THINK_TAGS: ReasoningSyntax
REASONING_XTML_THINK: ReasoningSyntax
REASONING_RECIPIENT_HEADER: ReasoningSyntax
REASONING_HARMONY: ReasoningSyntax
DTYPE_UNSPECIFIED: DType
I32: DType
I64: DType
U32: DType
U64: DType
F32: DType
F16: DType
BF16: DType
U8: DType
GGML_BLOCKS: DType
SPACE_UNSPECIFIED: Space
WEIGHT: Space
PERSISTENT: Space
CACHE: Space
SCRATCH: Space
TRANSPORT: Space
ACCESS_UNSPECIFIED: Access
READ: Access
WRITE: Access
READ_WRITE: Access

class Bundle(_message.Message):
    __slots__ = ("format", "serving", "execution", "resources")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    format: int
    serving: ServingContract
    execution: ExecutionManifest
    resources: _containers.RepeatedCompositeFieldContainer[Resource]
    def __init__(self, format: _Optional[int] = ..., serving: _Optional[_Union[ServingContract, _Mapping]] = ..., execution: _Optional[_Union[ExecutionManifest, _Mapping]] = ..., resources: _Optional[_Iterable[_Union[Resource, _Mapping]]] = ...) -> None: ...

class Resource(_message.Message):
    __slots__ = ("id", "kind", "bytes", "sha256", "path", "offset")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    id: str
    kind: str
    bytes: int
    sha256: bytes
    path: str
    offset: int
    def __init__(self, id: _Optional[str] = ..., kind: _Optional[str] = ..., bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., path: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class ServingContract(_message.Message):
    __slots__ = ("served_id", "aliases", "cache_identity", "context_tokens", "prefill_tokens", "pages", "snapshots", "max_active", "speculative_widths", "defaults", "eos_ids", "model")
    SERVED_ID_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    CACHE_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_WIDTHS_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    served_id: str
    aliases: _containers.RepeatedScalarFieldContainer[str]
    cache_identity: bytes
    context_tokens: int
    prefill_tokens: int
    pages: int
    snapshots: int
    max_active: int
    speculative_widths: _containers.RepeatedScalarFieldContainer[int]
    defaults: Sampling
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    model: ModelContract
    def __init__(self, served_id: _Optional[str] = ..., aliases: _Optional[_Iterable[str]] = ..., cache_identity: _Optional[bytes] = ..., context_tokens: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., pages: _Optional[int] = ..., snapshots: _Optional[int] = ..., max_active: _Optional[int] = ..., speculative_widths: _Optional[_Iterable[int]] = ..., defaults: _Optional[_Union[Sampling, _Mapping]] = ..., eos_ids: _Optional[_Iterable[int]] = ..., model: _Optional[_Union[ModelContract, _Mapping]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "max_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPEAT_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    max_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repeat_penalty: _Optional[float] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class ModelContract(_message.Message):
    __slots__ = ("version", "vocabulary", "input_vocabulary", "cache", "programs", "frontend", "states")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    INPUT_VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    FRONTEND_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    version: int
    vocabulary: int
    input_vocabulary: int
    cache: CacheContract
    programs: _containers.RepeatedCompositeFieldContainer[Program]
    frontend: Frontend
    states: _containers.RepeatedCompositeFieldContainer[StateView]
    def __init__(self, version: _Optional[int] = ..., vocabulary: _Optional[int] = ..., input_vocabulary: _Optional[int] = ..., cache: _Optional[_Union[CacheContract, _Mapping]] = ..., programs: _Optional[_Iterable[_Union[Program, _Mapping]]] = ..., frontend: _Optional[_Union[Frontend, _Mapping]] = ..., states: _Optional[_Iterable[_Union[StateView, _Mapping]]] = ...) -> None: ...

class CacheContract(_message.Message):
    __slots__ = ("page_tokens", "histories", "page_tables")
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HISTORIES_FIELD_NUMBER: _ClassVar[int]
    PAGE_TABLES_FIELD_NUMBER: _ClassVar[int]
    page_tokens: int
    histories: _containers.RepeatedCompositeFieldContainer[History]
    page_tables: _containers.RepeatedCompositeFieldContainer[PageTable]
    def __init__(self, page_tokens: _Optional[int] = ..., histories: _Optional[_Iterable[_Union[History, _Mapping]]] = ..., page_tables: _Optional[_Iterable[_Union[PageTable, _Mapping]]] = ...) -> None: ...

class History(_message.Message):
    __slots__ = ("kind", "planes", "tokens_per_record", "window_tokens", "state")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_RECORD_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    kind: HistoryKind
    planes: _containers.RepeatedScalarFieldContainer[str]
    tokens_per_record: int
    window_tokens: int
    state: str
    def __init__(self, kind: _Optional[_Union[HistoryKind, str]] = ..., planes: _Optional[_Iterable[str]] = ..., tokens_per_record: _Optional[int] = ..., window_tokens: _Optional[int] = ..., state: _Optional[str] = ...) -> None: ...

class PageTable(_message.Message):
    __slots__ = ("buffer", "page_offset")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    PAGE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    page_offset: int
    def __init__(self, buffer: _Optional[str] = ..., page_offset: _Optional[int] = ...) -> None: ...

class StateView(_message.Message):
    __slots__ = ("name", "buffer", "offset", "row_stride", "row_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ROW_STRIDE_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    buffer: str
    offset: int
    row_stride: int
    row_bytes: int
    def __init__(self, name: _Optional[str] = ..., buffer: _Optional[str] = ..., offset: _Optional[int] = ..., row_stride: _Optional[int] = ..., row_bytes: _Optional[int] = ...) -> None: ...

class StateAccess(_message.Message):
    __slots__ = ("state", "access")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    state: str
    access: Access
    def __init__(self, state: _Optional[str] = ..., access: _Optional[_Union[Access, str]] = ...) -> None: ...

class ValueBinding(_message.Message):
    __slots__ = ("buffer", "source", "indexing", "offset", "padding", "constant")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    INDEXING_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    CONSTANT_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    source: Source
    indexing: Indexing
    offset: int
    padding: int
    constant: int
    def __init__(self, buffer: _Optional[str] = ..., source: _Optional[_Union[Source, str]] = ..., indexing: _Optional[_Union[Indexing, str]] = ..., offset: _Optional[int] = ..., padding: _Optional[int] = ..., constant: _Optional[int] = ...) -> None: ...

class Program(_message.Message):
    __slots__ = ("name", "operation", "bindings", "accesses", "batch", "draft_tokens", "verify_tokens", "packed_tokens", "state_rows_per_request", "confidence_width", "pending_state", "pending_host", "cursor_lag", "cursor_state", "tuned")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    BINDINGS_FIELD_NUMBER: _ClassVar[int]
    ACCESSES_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PACKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_ROWS_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    PENDING_STATE_FIELD_NUMBER: _ClassVar[int]
    PENDING_HOST_FIELD_NUMBER: _ClassVar[int]
    CURSOR_LAG_FIELD_NUMBER: _ClassVar[int]
    CURSOR_STATE_FIELD_NUMBER: _ClassVar[int]
    TUNED_FIELD_NUMBER: _ClassVar[int]
    name: str
    operation: Operation
    bindings: _containers.RepeatedCompositeFieldContainer[ValueBinding]
    accesses: _containers.RepeatedCompositeFieldContainer[StateAccess]
    batch: int
    draft_tokens: int
    verify_tokens: int
    packed_tokens: int
    state_rows_per_request: int
    confidence_width: int
    pending_state: str
    pending_host: bool
    cursor_lag: int
    cursor_state: str
    tuned: _containers.RepeatedCompositeFieldContainer[TunedBinding]
    def __init__(self, name: _Optional[str] = ..., operation: _Optional[_Union[Operation, str]] = ..., bindings: _Optional[_Iterable[_Union[ValueBinding, _Mapping]]] = ..., accesses: _Optional[_Iterable[_Union[StateAccess, _Mapping]]] = ..., batch: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., verify_tokens: _Optional[int] = ..., packed_tokens: _Optional[int] = ..., state_rows_per_request: _Optional[int] = ..., confidence_width: _Optional[int] = ..., pending_state: _Optional[str] = ..., pending_host: _Optional[bool] = ..., cursor_lag: _Optional[int] = ..., cursor_state: _Optional[str] = ..., tuned: _Optional[_Iterable[_Union[TunedBinding, _Mapping]]] = ...) -> None: ...

class TunedBinding(_message.Message):
    __slots__ = ("buffer", "producer")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    producer: str
    def __init__(self, buffer: _Optional[str] = ..., producer: _Optional[str] = ...) -> None: ...

class Frontend(_message.Message):
    __slots__ = ("tokenizer", "chat_template", "tools", "reasoning", "boundaries", "bos_id", "add_bos", "add_eos", "eos_id")
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    BOS_ID_FIELD_NUMBER: _ClassVar[int]
    ADD_BOS_FIELD_NUMBER: _ClassVar[int]
    ADD_EOS_FIELD_NUMBER: _ClassVar[int]
    EOS_ID_FIELD_NUMBER: _ClassVar[int]
    tokenizer: str
    chat_template: str
    tools: ToolConfig
    reasoning: ReasoningConfig
    boundaries: _containers.RepeatedCompositeFieldContainer[PrefixBoundary]
    bos_id: int
    add_bos: bool
    add_eos: bool
    eos_id: int
    def __init__(self, tokenizer: _Optional[str] = ..., chat_template: _Optional[str] = ..., tools: _Optional[_Union[ToolConfig, _Mapping]] = ..., reasoning: _Optional[_Union[ReasoningConfig, _Mapping]] = ..., boundaries: _Optional[_Iterable[_Union[PrefixBoundary, _Mapping]]] = ..., bos_id: _Optional[int] = ..., add_bos: _Optional[bool] = ..., add_eos: _Optional[bool] = ..., eos_id: _Optional[int] = ...) -> None: ...

class ToolConfig(_message.Message):
    __slots__ = ("syntax", "open", "close", "separator", "wrap_newlines")
    SYNTAX_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    SEPARATOR_FIELD_NUMBER: _ClassVar[int]
    WRAP_NEWLINES_FIELD_NUMBER: _ClassVar[int]
    syntax: ToolSyntax
    open: str
    close: str
    separator: str
    wrap_newlines: bool
    def __init__(self, syntax: _Optional[_Union[ToolSyntax, str]] = ..., open: _Optional[str] = ..., close: _Optional[str] = ..., separator: _Optional[str] = ..., wrap_newlines: _Optional[bool] = ...) -> None: ...

class ReasoningConfig(_message.Message):
    __slots__ = ("syntax", "open", "close", "wrap_newlines", "terminal_marker", "assistant_open", "message_end")
    SYNTAX_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    WRAP_NEWLINES_FIELD_NUMBER: _ClassVar[int]
    TERMINAL_MARKER_FIELD_NUMBER: _ClassVar[int]
    ASSISTANT_OPEN_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_END_FIELD_NUMBER: _ClassVar[int]
    syntax: ReasoningSyntax
    open: str
    close: str
    wrap_newlines: bool
    terminal_marker: str
    assistant_open: str
    message_end: str
    def __init__(self, syntax: _Optional[_Union[ReasoningSyntax, str]] = ..., open: _Optional[str] = ..., close: _Optional[str] = ..., wrap_newlines: _Optional[bool] = ..., terminal_marker: _Optional[str] = ..., assistant_open: _Optional[str] = ..., message_end: _Optional[str] = ...) -> None: ...

class PrefixBoundary(_message.Message):
    __slots__ = ("roles", "requires_tools")
    ROLES_FIELD_NUMBER: _ClassVar[int]
    REQUIRES_TOOLS_FIELD_NUMBER: _ClassVar[int]
    roles: _containers.RepeatedScalarFieldContainer[str]
    requires_tools: bool
    def __init__(self, roles: _Optional[_Iterable[str]] = ..., requires_tools: _Optional[bool] = ...) -> None: ...

class ExecutionManifest(_message.Message):
    __slots__ = ("buffers", "programs", "tuning", "completion", "frames")
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    TUNING_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    buffers: _containers.RepeatedCompositeFieldContainer[Buffer]
    programs: _containers.RepeatedCompositeFieldContainer[Executable]
    tuning: _containers.RepeatedCompositeFieldContainer[Executable]
    completion: CompletionLayout
    frames: int
    def __init__(self, buffers: _Optional[_Iterable[_Union[Buffer, _Mapping]]] = ..., programs: _Optional[_Iterable[_Union[Executable, _Mapping]]] = ..., tuning: _Optional[_Iterable[_Union[Executable, _Mapping]]] = ..., completion: _Optional[_Union[CompletionLayout, _Mapping]] = ..., frames: _Optional[int] = ...) -> None: ...

class Buffer(_message.Message):
    __slots__ = ("name", "dtype", "shape", "space", "resource", "offset", "ggml_type", "layout", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    GGML_TYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    space: Space
    resource: str
    offset: int
    ggml_type: int
    layout: int
    bytes: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., space: _Optional[_Union[Space, str]] = ..., resource: _Optional[str] = ..., offset: _Optional[int] = ..., ggml_type: _Optional[int] = ..., layout: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class Executable(_message.Message):
    __slots__ = ("name", "ops", "graph")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    name: str
    ops: OpList
    graph: CudaGraph
    def __init__(self, name: _Optional[str] = ..., ops: _Optional[_Union[OpList, _Mapping]] = ..., graph: _Optional[_Union[CudaGraph, _Mapping]] = ...) -> None: ...

class OpList(_message.Message):
    __slots__ = ("ops", "scratch_bytes")
    OPS_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_BYTES_FIELD_NUMBER: _ClassVar[int]
    ops: _containers.RepeatedCompositeFieldContainer[Op]
    scratch_bytes: int
    def __init__(self, ops: _Optional[_Iterable[_Union[Op, _Mapping]]] = ..., scratch_bytes: _Optional[int] = ...) -> None: ...

class Op(_message.Message):
    __slots__ = ("kernel", "out", "attr")
    class AttrEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    IN_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    ATTR_FIELD_NUMBER: _ClassVar[int]
    kernel: str
    out: _containers.RepeatedScalarFieldContainer[str]
    attr: _containers.ScalarMap[str, float]
    def __init__(self, kernel: _Optional[str] = ..., out: _Optional[_Iterable[str]] = ..., attr: _Optional[_Mapping[str, float]] = ..., **kwargs) -> None: ...

class CudaGraph(_message.Message):
    __slots__ = ("resource", "feeds", "owned", "arch")
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    FEEDS_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    ARCH_FIELD_NUMBER: _ClassVar[int]
    resource: str
    feeds: _containers.RepeatedScalarFieldContainer[str]
    owned: _containers.RepeatedScalarFieldContainer[str]
    arch: str
    def __init__(self, resource: _Optional[str] = ..., feeds: _Optional[_Iterable[str]] = ..., owned: _Optional[_Iterable[str]] = ..., arch: _Optional[str] = ...) -> None: ...

class CompletionLayout(_message.Message):
    __slots__ = ("buffer", "row_words", "max_tokens")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    ROW_WORDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    row_words: int
    max_tokens: int
    def __init__(self, buffer: _Optional[str] = ..., row_words: _Optional[int] = ..., max_tokens: _Optional[int] = ...) -> None: ...
