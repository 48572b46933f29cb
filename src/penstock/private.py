"""Every private name of other libraries that penstock uses: any version may drop one.

A test refuses one in any other file. torch 2.11 to 2.13 and transformers 5.23 have all of them, unless a line
says otherwise. A comment says why we need the name, and after `instead:` what replaces it in a version that
lacks it: the mend is a line here. What nothing replaces has to be asked of torch anew.

Names with a path, below, are plain bindings: a call costs what the library's own costs. `LATE` are imported
when they are asked for. `ATTRIBUTES` of their objects cannot be imported: the table lists them.
"""

from __future__ import annotations

import pkgutil
from typing import Any

import torch
import torch.overrides
import torch.utils._python_dispatch
import torch.utils._pytree
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import modules

# ---- Tensors in tuples, lists, dicts and registered classes. instead: the package optree, for all of them
TreeSpec = torch.utils._pytree.TreeSpec
keystr = torch.utils._pytree.keystr
register_pytree_node = torch.utils._pytree.register_pytree_node
tree_flatten = torch.utils._pytree.tree_flatten
tree_flatten_with_path = torch.utils._pytree.tree_flatten_with_path
tree_leaves = torch.utils._pytree.tree_leaves
tree_map = torch.utils._pytree.tree_map
tree_map_only = torch.utils._pytree.tree_map_only
tree_unflatten = torch.utils._pytree.tree_unflatten
treespec_dumps = torch.utils._pytree.treespec_dumps  # tells another process the form of a payload
treespec_loads = torch.utils._pytree.treespec_loads

# ---- Modes: who sees the calls and ops of a thread
# ops beneath autograd; torch's notes document it for users
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
OpOverload = torch._ops.OpOverload  # the class of ops, for annotations. instead: Any
# calls that no mode of a user sees
disable_current_modes = torch.utils._python_dispatch._disable_current_modes
# whether there is any: asked for each product. instead: the stack's length
len_torch_function_stack = torch._C._len_torch_function_stack
# finds a mode of ours in it
get_current_function_mode_stack = torch.overrides._get_current_function_mode_stack
DisableTorchFunction = torch._C.DisableTorchFunction  # calls that no function mode sees
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass  # torch's notes tell subclasses to
DispatchKey = torch._C.DispatchKey
SetExcludeDispatchKeyGuard = torch._C._SetExcludeDispatchKeyGuard  # detaches beneath autograd, with versions
# names of ops that users may write. instead: dir(torch.ops.aten), which lacks those of other libraries
dispatch_get_all_op_names = torch._C._dispatch_get_all_op_names

# ---- Tensors without values that keep their device
FakeTensor = torch._subclasses.fake_tensor.FakeTensor  # instead: is_meta, with the device kept aside
FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode
# what fake tensors raise of code that looks at values, and of ops that need them. instead: RuntimeError,
# which hides other errors
LOOKS_AT_VALUES: tuple[type[Exception], ...] = (
    NotImplementedError,
    torch._subclasses.fake_tensor.DataDependentOutputException,
    torch._subclasses.fake_tensor.DynamicOutputShapeException,
)
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass  # a subclass without memory. instead: one on meta

# ---- What holds for this thread, or for this backward
# instead: torch.is_autocast_enabled of every type of device
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
are_functorch_transforms_active = torch._C._are_functorch_transforms_active  # torch.func looks at a product
unwrap_if_dead = torch._C._functorch.unwrap_if_dead  # what autograd.Function.apply does first
current_graph_task_id = torch._C._current_graph_task_id  # which backward runs; -1 outside
# who sees what is saved
top_saved_tensors_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks
# the class of nodes written in Python. instead: type(node).__module__ != "builtins"
FunctionBase: type = torch._C._FunctionBase
has_any_global_hook = modules.module._has_any_global_hook  # instead: whether the tables have entries
GLOBAL_FORWARD_HOOKS = (modules.module._global_forward_pre_hooks, modules.module._global_forward_hooks)

# ---- Memory: how many hold a storage. instead: weak references to every tensor that we made of it
storage_use_count = torch._C._storage_Use_Count

# ---- Streams
# a stream stands still for so many cycles. instead: a product of large matrices, timed before
cuda_sleep = torch.cuda._sleep

# ---- Ops
C_LINEAR = torch._C._nn.linear  # F.linear, before anybody replaced it
grouped_mm = torch._grouped_mm  # experts of transformers call it. instead: F.grouped_mm, where they call that
GROUPED_MM = torch.ops.aten._grouped_mm  # the same, beneath autograd
# one kernel for a list of tensors. instead: a loop
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
# a view that autograd takes for a tensor of its own. instead: an autograd.Function
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
# what Tensor.to, Tensor.item and fused attention are beneath autograd: for modes that look for them
TO_COPY = torch.ops.aten._to_copy.default
LOCAL_SCALAR_DENSE = torch.ops.aten._local_scalar_dense.default
FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention
FLASH_ATTENTION_FOR_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_ATTENTION_FOR_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
EFFICIENT_ATTENTION = torch.ops.aten._scaled_dot_product_efficient_attention
# tensors as one, for one message. instead: torch.cat and torch.split
flatten_dense_tensors = torch._utils._flatten_dense_tensors
take_tensors = torch._utils._take_tensors
unflatten_dense_tensors = torch._utils._unflatten_dense_tensors

# ---- Classes of modules. instead: each of torch's convolutions, and of its dropouts
ConvNd = modules.conv._ConvNd
DropoutNd = modules.dropout._DropoutNd

# ---- Processes and profiles
get_default_store = distributed_c10d._get_default_store  # instead: a store of ours, for init_process_group
set_pg_timeout = distributed_c10d._set_pg_timeout  # of groups that a mesh made. instead: new_group(timeout=)
concatenate_meshes = DeviceMesh._concatenate  # instead: a new mesh of the same ranks, with groups of its own
ExperimentalConfig = torch._C._profiler._ExperimentalConfig  # profiles every thread. instead: this one alone

# ---- For sys.modules: not imported means not used
DYNAMO = "torch._dynamo"

# ---- Imported when asked for: from slow modules, and from libraries that may be absent
LATE = {
    "has_triton": "torch.utils._triton:has_triton",  # instead: an import of triton
    "get_cpp_compiler": "torch._inductor.cpp_builder:get_cpp_compiler",  # instead: to compile a line
    "InvalidCxxCompiler": "torch._inductor.exc:InvalidCxxCompiler",
    # modes of torch.compile. instead: to compile nothing, which imports the whole compiler
    "list_mode_options": "torch._inductor:list_mode_options",
    # a mesh without processes: the import registers the backend "fake"
    "FakeStore": "torch.testing._internal.distributed.fake_pg:FakeStore",
    "TrainingState": "torch.distributed.fsdp._fully_shard._fsdp_common:TrainingState",
    # the owner of a hook that reads no gradient. instead: whole logits with FSDP2
    "FSDPState": "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState",
    # sizes of a shard. instead: those of a DTensor on meta
    "local_shape_and_offset": "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
    "active_collector": "transformers.utils.output_capturing:_active_collector",  # records hidden states
    "CAN_RECORD_REGISTRY": "transformers.utils.output_capturing:_CAN_RECORD_REGISTRY",
    "SAFETENSORS_TYPES": "safetensors.torch:_TYPES",  # instead: the names of the format, written here
    "TorchaoAdamW": "torchao.optim:_AdamW",  # of moments in any dtype. instead: one of our own
}


def __getattr__(name: str) -> Any:
    if name in LATE:
        return pkgutil.resolve_name(LATE[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---- Attributes of their objects, and variables of their modules that change: by owner, and what for
ATTRIBUTES: dict[str, dict[str, str]] = {
    "torch:Tensor": {
        "_backward_hooks": "whether a hook looks at the gradient",
        "_post_accumulate_grad_hooks": "whether a hook waits for the whole gradient",
        "_base": "what a view is of",
        "_is_view": "whether its storage has another tensor",
        "_version": "whether it was written to in place",
    },
    "torch:UntypedStorage": {"_cdata": "its address, the same for every Python object of it"},
    "torch.nn:Module": {
        "_parameters": "own parameters, also those that are shared, None or replaced",
        "_buffers": "own buffers",
        "_non_persistent_buffers_set": "which of them no checkpoint has",
        "_modules": "own modules, None too; and in each step, without a generator",
        "_apply": "to move tensors in place, as `to` does",
        "_forward_hooks": "to run without them, copy them, or see whether there are any",
        "_forward_pre_hooks": "likewise",
        "_forward_hooks_always_called": "likewise",
        "_backward_hooks": "likewise",
        "_backward_pre_hooks": "likewise",
        "_compiled_call_impl": "whether `compile` was called",
    },
    "torch.autograd:Function": {"_backward_cls": "the class of its nodes: the engine calls no wrapper"},
    "torch.autograd:Variable": {"_execution_engine": "a backward without torch.autograd.backward's checks"},
    "torch.autograd.forward_ad": {"_current_level": "whether forward-mode autograd looks at a product"},
    "torch.autograd.profiler": {"_is_profiler_enabled": "whether somebody reads an op's name"},
    "torch._ops:OpOverload": {
        "_overloadpacket": "which op it is, whatever its arguments",
        "_schema": "which arguments an op writes, and what it returns",
    },
    "torch.distributed:ProcessGroup": {
        "_device_types": "which devices a group serves",
        "_get_backend": "its gloo or NCCL: options, abort",
    },
    "torch.distributed:ProcessGroupNCCL": {
        "_group_start": "aborts of several communicators at once",
        "_group_end": "likewise",
    },
    "torch.distributed.distributed_c10d:Backend": {"_timeout": "of its options: a group's limit"},
    "torch.distributed.device_mesh:DeviceMesh": {
        "_flatten": "axes as one",
        "_unflatten": "an axis as two",
        "_layout": "which ranks a slice of a mesh has",
        "_rank_map": "likewise",
    },
    "torch.distributed.tensor:DTensor": {"_local_tensor": "this rank's shard, without autograd"},
    "torch.distributed.fsdp:FSDPModule": {"_get_fsdp_state": "what FSDP2 knows of a module"},
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": {
        "_comm_ctx": "the streams of its collectives",
        "_is_root": "whose callback ends a backward",
        "_root_post_backward_final_callback": "called by us, after the last backward of a step",
        "_fsdp_param_groups": "the weights that are gathered together; not in torch 2.11",
        "_fsdp_param_group": "likewise, in torch 2.11",
        "_pre_backward": "the hook that gathers a module's weights before its backward",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam": {
        "_module_info": "where a weight belongs",
        "_param_fqn": "its name",
        "_unsharded_param": "the whole weight",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup": {
        "_training_state": "set back after a forward that ends half-way through the model's",
    },
    "transformers:PreTrainedModel": {
        "_adjust_missing_and_unexpected_keys": "what a family leaves out on purpose",
        "_can_set_experts_implementation": "whether it has experts of the registry",
        "_from_config": "a model of a config, in a dtype and an attention",
        "_get_dtype_plan": "what a family keeps in float32",
        "_init_weights": "first values of each module",
        "_is_stateful": "whether its state runs over the sequence",
        "_keys_to_ignore_on_load_unexpected": "which weights of files it has no module for",
        "_keys_to_ignore_on_save": "which weights files leave out",
        "_loss_function": "set for a while: the loss in float64",
        "_tied_weights_keys": "set for prediction layers, which share the embedding",
    },
    "transformers:PreTrainedConfig": {
        "_attn_implementation": "which attention runs",
        "_attn_implementation_internal": "set without the check of the setter",
        "_experts_implementation": "which product of experts runs",
        "_experts_implementation_internal": "set without the check of the setter",
        "_name_or_path": "no difference between two configs",
    },
    "transformers:GenerationMixin": {
        "_supports_default_dynamic_cache": "whether its cache is the library's",
        "_update_model_kwargs_for_generation": "mask and positions of the next token",
    },
    "transformers:GenerationConfig": {"_pad_token_tensor": "what ended rows go on with"},
    "transformers:Trainer": {  # the methods that PipelineTrainer replaces are in its test
        "_push_from_checkpoint": "to the Hub, as after its own checkpoints",
        "_save_rng_state": "of Python and numpy",
    },
    "transformers.initialization": {"_is_hf_initialized": "values that are there stay"},
    "transformers.utils.generic:GeneralInterface": {"_global_mapping": "to take a name out of a registry"},
    "transformers.models.auto.auto_factory:_BaseAutoModelClass": {
        "_model_mapping": "which class it makes of a config"
    },
    "transformers.integrations.moe": {"_apply_gate": "marks experts of the registry"},
    "transformers.masking_utils": {"_preprocess_mask_arguments": "replaced: which mask was made of which"},
    "transformers.modeling_flash_attention_utils": {"_is_packed_sequence": "replaced: the host knows"},
    "transformers.utils.output_capturing": {"_active_collector": "no recorder sees a probe"},
    "peft.tuners.trainable_tokens.layer": {"_tied_adapter": "emptied: it holds whole weights"},
    "torchao.optim:_AdamW": {"_new_buffer": "in whose place are moments in bfloat16"},
    "numpy._core.memmap": {"_mmap": "to unmap pages that were read"},
}
