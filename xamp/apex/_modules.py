"""Which module answers for which module of Apex, and what is left out, each with what takes its place.

Plain data: nothing is imported here, so a command can read it where torch is missing.
"""

from __future__ import annotations

__all__ = ["EXTENSIONS", "LEFT_OUT", "MODULES", "left_out"]

_FILE, _OWN = "apex.optimizers.npu_fused_", "xamp.apex.optimizers.npu_fused"
MODULES = {
    "apex": "xamp.apex",
    "apex.amp": "xamp.apex.amp",
    "apex.amp._amp_state": "xamp.apex._amp_state",
    "apex.amp.frontend": "xamp.apex._frontend",
    "apex.amp.handle": "xamp.apex._scale_loss",
    "apex.amp.scaler": "xamp.apex._loss_scaler",
    "apex.contrib": "xamp.apex.contrib",
    "apex.contrib.clip_grad": "xamp.apex.contrib.clip_grad",
    "apex.contrib.clip_grad.clip_grad": "xamp.apex.contrib.clip_grad",
    "apex.contrib.optimizers": "xamp.apex.contrib.optimizers",
    "apex.contrib.optimizers.fp16_optimizer": "xamp.apex.contrib.optimizers",
    "apex.contrib.optimizers.fused_adam": "xamp.apex.contrib.optimizers",
    "apex.contrib.optimizers.fused_lamb": "xamp.apex.contrib.optimizers",
    "apex.contrib.optimizers.fused_sgd": "xamp.apex.contrib.optimizers",
    "apex.contrib.xentropy": "xamp.apex.contrib.xentropy",
    "apex.contrib.xentropy.softmax_xentropy": "xamp.apex.contrib.xentropy",
    "apex.fp16_utils": "xamp.apex.fp16_utils",
    "apex.fp16_utils.fp16_optimizer": "xamp.apex.fp16_utils.fp16_optimizer",
    "apex.fp16_utils.fp16util": "xamp.apex.fp16_utils.fp16util",
    "apex.fp16_utils.loss_scaler": "xamp.apex.fp16_utils.loss_scaler",
    "apex.fused_dense": "xamp.apex.fused_dense",
    "apex.fused_dense.fused_dense": "xamp.apex.fused_dense",
    "apex.mlp": "xamp.apex.mlp",
    "apex.mlp.mlp": "xamp.apex.mlp",
    "apex.multi_tensor_apply": "xamp.apex.multi_tensor_apply",
    "apex.multi_tensor_apply.multi_tensor_apply": "xamp.apex.multi_tensor_apply",
    "apex.normalization": "xamp.apex.normalization",
    "apex.normalization.fused_layer_norm": "xamp.apex.normalization",
    "apex.optimizers": "xamp.apex.optimizers",
    "apex.optimizers.fused_adagrad": "xamp.apex.optimizers.fused_adagrad",
    "apex.optimizers.fused_adam": "xamp.apex.optimizers.fused_adam",
    "apex.optimizers.fused_lamb": "xamp.apex.optimizers.fused_lamb",
    "apex.optimizers.fused_mixed_precision_lamb": "xamp.apex.optimizers.fused_mixed_precision_lamb",
    "apex.optimizers.fused_novograd": "xamp.apex.optimizers.fused_novograd",
    "apex.optimizers.fused_sgd": "xamp.apex.optimizers.fused_sgd",
    "apex.optimizers.lamb": f"{_OWN}_others",
    **dict.fromkeys([_FILE + each for each in ("adadelta", "adam", "adamw", "rmsprop", "sgd")], _OWN),
    **dict.fromkeys([_FILE + each for each in ("adamp", "bert_adam", "lamb", "rmsprop_tf")], f"{_OWN}_others"),
    "apex.parallel": "xamp.apex.parallel",
    "apex.parallel.LARC": "xamp.apex.parallel.LARC",
    "apex.parallel.distributed": "xamp.apex.parallel.distributed",
    "apex.parallel.multiproc": "xamp.apex.parallel.multiproc",
    "apex.parallel.optimized_sync_batchnorm": "xamp.apex.parallel.sync_batchnorm",
    "apex.parallel.sync_batchnorm": "xamp.apex.parallel.sync_batchnorm",
    "apex.pyprof": "xamp.apex.pyprof",
    "apex.pyprof.nvtx": "xamp.apex.pyprof",
    "amp_C": "xamp.apex.amp_C",
    "apex_C": "xamp.apex.apex_C",
}
"""Module of Apex: module of xamp. Parents stand before their children."""

LEFT_OUT = {
    "apex.RNN": "use torch.nn.LSTM, torch.nn.GRU and torch.nn.RNN",
    "apex.contrib.bottleneck": "use the Bottleneck block of torchvision.models.resnet",
    "apex.contrib.combine_tensors": "use torch._utils._flatten_dense_tensors",
    "apex.contrib.conv_bias_relu": "use torch.nn.Conv2d and torch.nn.ReLU under torch.compile",
    "apex.contrib.cudnn_gbn": "use torch.nn.SyncBatchNorm with a process_group",
    "apex.contrib.fmha": "use torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.focal_loss": "use torchvision.ops.sigmoid_focal_loss",
    "apex.contrib.group_norm": "use torch.nn.GroupNorm",
    "apex.contrib.groupbn": "use torch.nn.SyncBatchNorm with a process_group",
    "apex.contrib.index_mul_2d": "write in1[index] * in2",
    "apex.contrib.layer_norm": "use torch.nn.LayerNorm",
    "apex.contrib.multihead_attn": "use torch.nn.MultiheadAttention",
    "apex.contrib.nccl_allocator": "use torch.cuda.MemPool with the allocator of the process group",
    "apex.contrib.openfold_triton": "use torch.nn.functional.scaled_dot_product_attention and torch.nn.LayerNorm",
    "apex.contrib.peer_memory": "use torch.distributed._symmetric_memory",
    "apex.contrib.sparsity": "use torch.sparse.to_sparse_semi_structured, or torch.ao.pruning.WeightNormSparsifier",
    "apex.contrib.transducer": "use torchaudio.functional.rnnt_loss",
    "apex.reparameterization": "use torch.nn.utils.parametrizations.weight_norm",
    "apex.transformer": "use torch.distributed.tensor.parallel and torch.distributed.pipelining",
    "apex.contrib.optimizers.distributed_fused_adam": "use torch.distributed.optim.ZeroRedundancyOptimizer or FSDP",
    "apex.contrib.optimizers.distributed_fused_lamb": "use ZeroRedundancyOptimizer of torch.distributed.optim",
}
"""Module of Apex that xamp does not have: what to do in its place."""

EXTENSIONS = {
    "distributed_adam_cuda": LEFT_OUT["apex.contrib.optimizers.distributed_fused_adam"],
    "fused_adam_cuda": "use apex.optimizers.FusedAdam",
    "fused_dense_cuda": "use apex.fused_dense",
    "fused_lamb_cuda": "use apex.optimizers.FusedLAMB",
    "fused_layer_norm_cuda": "use apex.normalization",
    "mlp_cuda": "use apex.mlp",
    "scaled_masked_softmax_cuda": "use torch.softmax",
    "scaled_upper_triang_masked_softmax_cuda": "use torch.softmax",
    "syncbn": "use apex.parallel.SyncBatchNorm",
    "xentropy_cuda": "use apex.contrib.xentropy.SoftmaxCrossEntropyLoss",
}
"""Compiled module of Apex, beside ``amp_C`` and ``apex_C``: which module of Apex calls it, and runs here without."""


def left_out(name: str) -> ImportError:
    """The error for ``import`` of what xamp does not have.

    Args:
        name: as the script gives it, a key of ``LEFT_OUT`` or of ``EXTENSIONS``.
    """
    if name in EXTENSIONS:  # scripts guard these as what may not be installed
        text = f"{name} is not part of xamp, which needs no compiled module: {EXTENSIONS[name]} instead. "
        return ModuleNotFoundError(f"{text}docs/apex.md lists what there is.", name=name)
    return ImportError(
        f"{name} is not part of xamp: {LEFT_OUT[name]} instead. docs/apex.md lists what there is.", name=name
    )
