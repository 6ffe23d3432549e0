"""The private names of torch that xamp uses: data, a line for each. A test asks the torch that is there for every line.

``ci/private_names.py`` compares the lines with the modules that name these names. Reading this imports no torch.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["NAMES", "NEEDED", "Name"]

NEEDED = "does not work"


class Name(NamedTuple):
    """A private name of torch.

    Attributes:
        name: as it is written in a module that adapts to torch.
        used_by: the packages that use it, sorted; ``backends``, and ``emulation`` for the emulated card, which is a
        part.
        since: the first release that has it, of those that xamp takes; all later ones have it too.
        without: what xamp does in a release without it. What is bound where it is imported is needed.
        build: what a build of torch must have for it: ``"cuDNN"``, ``"distributed"``; empty: nothing.
        public: the public name of the same object, where it is not taken because others replace what has that name.
    """

    name: str
    used_by: str
    since: str
    without: str = NEEDED
    build: str = ""
    public: str = ""


NAMES = (
    Name("torch._C.TensorBase.is_cuda", "run", "2.7"),
    Name("torch._C.TensorBase.to", "run", "2.7"),
    Name("torch._C._AutoDispatchBelowAutograd", "op_dtypes", "2.7"),
    Name("torch._C._DisableAutocast", "casting registry", "2.7"),
    Name("torch._C._ExcludeDispatchKeyGuard", "emulation", "2.7"),
    Name("torch._C._InferenceMode", "casting", "2.7"),
    Name("torch._C._VariableFunctions", "casting", "2.7"),
    Name("torch._C._autograd._get_sequence_nr", "casting debug", "2.7"),
    Name("torch._C._autograd._profiler_enabled", "scaling", "2.7"),
    Name("torch._C._construct_storage_from_data_pointer", "emulation", "2.7"),
    Name("torch._C._cudnn", "backends", "2.7", "recurrent layers in bf16 are not cuDNN's", build="cuDNN"),
    Name("torch._C._current_autograd_node", "casting debug", "2.7"),
    Name("torch._C._current_graph_task_id", "casting scaling", "2.7"),
    Name("torch._C._dispatch_get_registrations_for_dispatch_key", "emulation op_dtypes", "2.7"),
    Name("torch._C._dispatch_has_kernel", "casting", "2.7"),
    Name("torch._C._dispatch_has_kernel_for_dispatch_key", "backends casting emulation op_dtypes", "2.7"),
    Name("torch._C._dispatch_key_for_device", "casting", "2.7"),
    Name("torch._C._dispatch_key_parse", "emulation", "2.7"),
    Name("torch._C._dispatch_keyset_full_after", "casting", "2.7"),
    Name("torch._C._dispatch_tls_set_dispatch_key_excluded", "casting", "2.7"),
    Name("torch._C._distributed_c10d.PrefixStore", "emulation", "2.7", build="distributed"),
    Name("torch._C._distributed_c10d.Work.unbox", "emulation", "2.7", build="distributed"),
    Name("torch._C._distributed_c10d._create_work_from_future", "emulation", "2.7", build="distributed"),
    Name("torch._C._dynamo.eval_frame", "torch_compat", "2.7"),
    Name("torch._C._dynamo.eval_frame._FrameAction.DEFAULT", "torch_compat", "2.7"),
    Name("torch._C._dynamo.eval_frame._FrameAction.SKIP", "torch_compat", "2.7"),
    Name("torch._C._dynamo.eval_frame._FrameExecStrategy", "torch_compat", "2.7"),
    Name("torch._C._dynamo.eval_frame.set_code_exec_strategy", "torch_compat", "2.7"),
    Name("torch._C._functorch.peek_interpreter_stack", "apex", "2.7"),
    Name("torch._C._get_cudnn_enabled", "backends", "2.7"),
    Name("torch._C._get_privateuse1_backend_name", "op_dtypes testing", "2.7"),
    Name("torch._C._get_tensor_metadata", "emulation", "2.7"),
    Name("torch._C._get_tracing_state", "apex", "2.7"),
    Name("torch._C._is_torch_function_mode_enabled", "casting", "2.7"),
    Name("torch._C._len_torch_dispatch_stack", "apex", "2.7"),
    Name("torch._C._linalg", "casting", "2.7"),
    Name("torch._C._nn", "casting", "2.7"),
    Name("torch._C._set_grad_enabled", "casting scaling", "2.7"),
    Name("torch._C.autocast_decrement_nesting", "casting scaling", "2.7", public="torch.autocast_decrement_nesting"),
    Name("torch._C.autocast_increment_nesting", "casting scaling", "2.7", public="torch.autocast_increment_nesting"),
    Name("torch._C.clear_autocast_cache", "averages casting scaling", "2.7", public="torch.clear_autocast_cache"),
    Name("torch._C.get_autocast_dtype", "apex casting", "2.7", public="torch.get_autocast_dtype"),
    Name("torch._C.is_autocast_cache_enabled", "apex casting", "2.7", public="torch.is_autocast_cache_enabled"),
    Name("torch._C.is_autocast_enabled", "apex casting", "2.7", public="torch.is_autocast_enabled"),
    Name("torch._C.set_autocast_cache_enabled", "casting", "2.7", public="torch.set_autocast_cache_enabled"),
    Name("torch._C.set_autocast_dtype", "casting", "2.7", public="torch.set_autocast_dtype"),
    Name("torch._C.set_autocast_enabled", "casting", "2.7", public="torch.set_autocast_enabled"),
    Name("torch._VF", "apex", "2.7"),
    Name("torch._amp_foreach_non_finite_check_and_unscale_", "registry testing torch_compat", "2.7"),
    Name("torch._amp_update_scale_", "registry testing torch_compat", "2.7"),
    Name("torch._conj", "emulation", "2.7"),
    Name("torch._cudnn_rnn_flatten_weight", "backends", "2.7"),
    Name("torch._dynamo", "debug", "2.7"),
    Name("torch._dynamo.compiled_autograd.COMPILE_COUNTER", "run", "2.7"),
    Name("torch._dynamo.convert_frame.output_codes", "torch_compat", "2.7"),
    Name("torch._dynamo.exc.Unsupported", "casting", "2.7"),
    Name("torch._dynamo.graph_break", "apex", "2.7"),
    Name("torch._dynamo.trace_rules.get_tensor_method", "apex run", "2.7"),
    Name("torch._dynamo.trace_rules.get_torch_obj_rule_map", "apex casting run", "2.7"),
    Name("torch._foreach_add", "apex updates", "2.7"),
    Name("torch._foreach_add_", "apex updates", "2.7"),
    Name("torch._foreach_addcdiv_", "updates", "2.7"),
    Name("torch._foreach_addcmul_", "apex updates", "2.7"),
    Name("torch._foreach_copy_", "apex registry testing torch_compat", "2.7"),
    Name("torch._foreach_div", "apex updates", "2.7"),
    Name("torch._foreach_div_", "updates", "2.7"),
    Name("torch._foreach_lerp_", "registry testing torch_compat updates", "2.7"),
    Name("torch._foreach_mul", "apex updates", "2.7"),
    Name("torch._foreach_mul_", "apex backends plans registry testing torch_compat updates", "2.7"),
    Name("torch._foreach_norm", "registry testing torch_compat", "2.7"),
    Name("torch._foreach_sqrt", "apex updates", "2.7"),
    Name("torch._foreach_sub", "debug", "2.7"),
    Name("torch._functorch.config.patch", "testing", "2.7", "the suite leaves that cache on"),
    Name("torch._fused_adagrad_", "testing", "2.7"),
    Name("torch._fused_adam_", "testing updates", "2.7"),
    Name("torch._fused_adamw_", "testing updates", "2.7"),
    Name("torch._fused_sgd_", "testing updates", "2.7"),
    Name("torch._guards.TracingContext.try_get", "casting", "2.7"),
    Name("torch._jit_internal.boolean_dispatched", "casting", "2.7"),
    Name("torch._neg_view", "emulation", "2.7"),
    Name("torch._ops.OpOverload", "emulation op_dtypes", "2.7"),
    Name("torch._prims_common.suggest_memory_format", "emulation", "2.7"),
    Name("torch._scaled_mm", "torch_compat", "2.7"),
    Name("torch._subclasses.fake_tensor.FakeTensorMode", "op_dtypes", "2.7"),
    Name("torch._subclasses.fake_tensor.unset_fake_temporarily", "op_dtypes", "2.7"),
    Name("torch._subclasses.functional_tensor.FunctionalTensor", "apex", "2.7"),
    Name("torch._use_cudnn_rnn_flatten_weight", "backends", "2.7"),
    Name("torch._utils._flatten_dense_tensors", "apex", "2.7"),
    Name("torch._utils._unflatten_dense_tensors", "apex", "2.7"),
    Name("torch._weights_only_unpickler._get_allowed_globals", "run", "2.7"),
    Name("torch.autograd.Variable._execution_engine.queue_callback", "casting", "2.7"),
    Name("torch.compiler._is_compiling_flag", "casting registry", "2.7"),
    Name("torch.compiler.config._config", "torch_compat", "2.7", "the tag is in the cache keys of this thread only"),
    Name("torch.cpu._is_amx_tile_supported", "torch_compat", "2.7"),
    Name("torch.distributed.ProcessGroup._end_coalescing", "emulation", "2.7", build="distributed"),
    Name("torch.distributed.ProcessGroup._start_coalescing", "emulation", "2.7", build="distributed"),
    Name("torch.distributed._composable.contract.STATE_KEY", "distributed", "2.7", build="distributed"),
    Name("torch.distributed.distributed_c10d._get_process_group_store", "distributed", "2.7", build="distributed"),
    Name("torch.distributed.distributed_c10d._world.pg_map", "distributed", "2.7", build="distributed"),
    Name("torch.jit._builtins._get_builtin_table", "casting", "2.7"),
    Name("torch.library._impls.discard", "casting emulation", "2.7"),
    Name("torch.nn.modules._functions.SyncBatchNorm", "apex", "2.7"),
    Name("torch.nn.modules.batchnorm._BatchNorm", "apex", "2.7"),
    Name("torch.nn.modules.instancenorm._InstanceNorm", "apex", "2.7"),
    Name("torch.nn.parallel.DistributedDataParallel._active_ddp_module", "casting distributed", "2.7"),
    Name("torch.ops.aten._amp_foreach_non_finite_check_and_unscale_", "emulation", "2.7"),
    Name("torch.ops.aten._fft_c2c", "emulation", "2.7"),
    Name("torch.ops.aten._fft_r2c", "emulation", "2.7"),
    Name("torch.ops.aten._local_scalar_dense.default", "testing", "2.7"),
    Name("torch.ops.aten._pack_padded_sequence.default._op_dk", "emulation", "2.7"),
    Name("torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors", "emulation", "2.7"),
    Name("torch.ops.aten._to_copy.default", "emulation testing", "2.7"),
    Name("torch.optim.optimizer._default_to_fused_or_foreach", "backends sessions", "2.7"),
    Name("torch.optim.optimizer._global_optimizer_post_hooks", "scaling", "2.7"),
    Name("torch.optim.optimizer._global_optimizer_pre_hooks", "scaling", "2.7"),
    Name("torch.storage._StorageBase", "run", "2.7"),
    Name("torch.utils._device.DeviceContext", "run", "2.7"),
    Name("torch.utils._device._device_constructors", "run", "2.7"),
    Name("torch.utils._python_dispatch.TorchDispatchMode", "debug op_dtypes testing", "2.7"),
    Name("torch.utils._python_dispatch._disable_current_modes", "registry scaling torch_compat", "2.7"),
    Name("torch.utils._python_dispatch.is_traceable_wrapper_subclass", "debug", "2.7"),
    Name("torch.utils._pytree.tree_iter", "debug testing", "2.7"),
    Name("torch.utils._pytree.tree_map", "debug", "2.7"),
    Name("torch.utils.checkpoint._checkpoint_without_reentrant_generator", "casting", "2.7"),
    Name(
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl",
        "casting",
        "2.15",
        "the generator that has the name without _impl is wrapped, which in 2.15 calls this one",
    ),
)
