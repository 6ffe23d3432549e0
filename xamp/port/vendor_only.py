"""What runs on one vendor's devices only, and what to use elsewhere: libraries, names, commands, variables.

To add one, add a row. Rules for Python (:mod:`xamp.port.rules.one_vendor`) and for other files
(:mod:`xamp.port.other`) read the same rows, by :mod:`xamp.port.vendor_names`. A text says what to do on another device;
where nothing is known it says so.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    *("ATTRIBUTES", "CALLS", "COMMANDS", "LIBRARIES", "PREFIXES", "RESOURCE", "TEXTS", "VARIABLES"),
    *("Library", "Name", "Variable"),
]


class Library(NamedTuple):
    """A library that works on one vendor's devices only.

    Attributes:
        modules: dotted names as scripts import them, with spaces between; names below one belong to it.
        packages: names as pip and conda know them, in lower case with hyphens; ``*`` stands for anything.
        instead: what to use on another device.
    """

    modules: str
    packages: str
    instead: str


class Name(NamedTuple):
    """A name that uses CUDA, of a module that works on other devices too.

    Attributes:
        text: what to do where a script uses it.
        never_runs: it is an error on another device.
    """

    text: str
    never_runs: bool = False


class Variable(NamedTuple):
    """An environment variable that one vendor's software reads.

    Attributes:
        beside: the variable that the other vendor's software reads in its place; empty where there is none.
        text: what it means; empty for one that has no effect on another device, and needs no word.
        is_certain: that one takes the same values, and may be written beside.
    """

    beside: str = ""
    text: str = ""
    is_certain: bool = False


_TORCH = "write it with torch's own operators"
_NO_NPU = "it has no build for NPUs"
_SPARSE = "Ascend's DrivingSDK (mx_driving) has SparseConv3d, SubMConv3d and SparseInverseConv3d"
_ATTENTION = "torch.nn.functional.scaled_dot_product_attention runs on every device"
_FIGURES = "xamp.accel.memory_allocated(), mem_get_info() and get_device_name() answer on every device"
_RENDER = f"a renderer that is compiled for CUDA; {_NO_NPU}"
_DECODE = "decode on the CPU, with torchvision or PyAV"
_TABLES = "use pandas, scikit-learn or NumPy on the CPU"

LIBRARIES = (
    Library(
        "numba.cuda",
        "",
        f"numba compiles no kernels for NPUs; {_TORCH}, or use numba.njit on the CPU",
    ),
    Library(
        "cupy cupyx cupy_backends",
        "cupy cupy-*",
        "CuPy has no NPUs; use NumPy, or torch tensors",
    ),
    Library(
        "pycuda",
        "pycuda",
        f"PyCUDA compiles for CUDA; {_TORCH}",
    ),
    Library(
        "skcuda pycudwt reikna.cluda",
        "scikit-cuda pycudwt",
        f"it stands on CUDA; {_TORCH}",
    ),
    Library(
        "cuda.cudart cuda.cuda cuda.nvrtc cuda.bindings cuda.core",
        "cuda-python cuda-bindings cuda-core",
        "the CUDA runtime is CUDA's only; xamp.accel has what torch.cuda has of it",
    ),
    Library(
        "pynvml py3nvml nvidia_smi nvsmi gpustat nvitop GPUtil pynvx",
        "pynvml nvidia-ml-py* py3nvml nvsmi gpustat nvitop gputil",
        f"it asks NVIDIA's driver; {_FIGURES}",
    ),
    Library(
        "spconv",
        "spconv*",
        _SPARSE,
    ),
    Library(
        "MinkowskiEngine",
        "minkowskiengine",
        f"it has no build for NPUs; {_SPARSE}",
    ),
    Library(
        "torchsparse",
        "torchsparse*",
        f"it has no build for NPUs; {_SPARSE}",
    ),
    Library(
        "flash_attn flash_attn_interface flash_attn_cuda flash_attn_2_cuda",
        "flash-attn* flash-attention",
        f"{_ATTENTION}; torch_npu.npu_fusion_attention is Ascend's own",
    ),
    Library(
        "xformers",
        "xformers",
        _ATTENTION,
    ),
    Library(
        "sageattention flashinfer flash_mla deep_gemm deep_ep",
        "sageattention flashinfer*",
        _ATTENTION,
    ),
    Library(
        "bitsandbytes",
        "bitsandbytes*",
        "no release has kernels for NPUs; use torch.optim, and load the model in bf16",
    ),
    Library(
        "mmcv.ops mmcv._ext mmdet.ops mmdet3d.ops",
        "mmcv-full",
        "build mmcv on the NPU machine with MMCV_WITH_OPS=1 FORCE_NPU=1; some of its operators have a form "
        "for NPUs, the others have none",
    ),
    Library(
        "detectron2._C maskrcnn_benchmark._C",
        "",
        "the extension is compiled for CUDA or the CPU; torchvision.ops has roi_align and nms",
    ),
    Library(
        "nvidia.dali",
        "nvidia-dali*",
        "DALI loads data by CUDA; use torchvision.transforms in a DataLoader",
    ),
    Library(
        "PyNvCodec PyNvVideoCodec nvidia.nvimgcodec nvjpeg",
        "pynvvideocodec pynvcodec vpf nvidia-nvimgcodec*",
        _DECODE,
    ),
    Library(
        "triton",
        "triton triton-nightly pytorch-triton*",
        "Triton compiles for GPUs; on an NPU triton-ascend takes its place, and not every kernel compiles there",
    ),
    Library(
        "tensorrt torch_tensorrt torch2trt tensorrt_llm polygraphy onnx_tensorrt",
        "tensorrt* nvidia-tensorrt torch-tensorrt torch2trt polygraphy",
        "TensorRT runs models on NVIDIA GPUs; export to ONNX and convert with Ascend's ATC",
    ),
    Library(
        "transformer_engine transformer_engine_torch",
        "transformer-engine*",
        "it is for NVIDIA GPUs; use torch.nn.Linear and torch.nn.LayerNorm under xamp",
    ),
    Library(
        "megatron",
        "megatron-core",
        "Megatron builds CUDA kernels; Ascend's MindSpeed patches it for NPUs",
    ),
    Library(
        "cudf cuml cugraph cuspatial cucim rmm dask_cuda dask_cudf raft_dask pylibraft",
        "cudf* cuml* cugraph* cuspatial* cucim* rmm rmm-* dask-cuda dask-cudf* rapids",
        f"RAPIDS runs on NVIDIA GPUs; {_TABLES}",
    ),
    Library(
        "faiss.StandardGpuResources faiss.GpuIndexFlatL2 faiss.GpuIndexFlatIP faiss.GpuIndexFlatConfig "
        "faiss.index_cpu_to_gpu faiss.index_cpu_to_all_gpus faiss.index_cpu_to_gpu_multiple "
        "faiss.get_num_gpus faiss.GpuClonerOptions faiss.contrib.torch_utils",
        "faiss-gpu*",
        "faiss searches on GPUs or the CPU; keep the index on the CPU",
    ),
    Library(
        "nvdiffrast kaolin tinycudann gsplat diff_gaussian_rasterization simple_knn raymarching nerfacc "
        "diff_surfel_rasterization neural_renderer",
        "nvdiffrast kaolin tinycudann gsplat nerfacc",
        _RENDER,
    ),
    Library(
        "mamba_ssm causal_conv1d selective_scan_cuda causal_conv1d_cuda",
        "mamba-ssm causal-conv1d",
        f"its kernels are compiled for CUDA; {_TORCH}",
    ),
    Library(
        "torch_scatter torch_sparse torch_cluster torch_spline_conv pyg_lib",
        "torch-scatter torch-sparse torch-cluster torch-spline-conv pyg-lib",
        "its operators are for CUDA and the CPU; torch.scatter_reduce and torch.index_add run on every device",
    ),
    Library(
        "pointnet2 pointnet2_ops pointnet2_cuda pointops pointops_cuda chamfer_3D chamferdist emd_cuda "
        "knn_cuda pytorch3d._C",
        "pointnet2-ops* chamferdist knn-cuda",
        "it is compiled for CUDA; mx_driving of Ascend's DrivingSDK has some of these operators",
    ),
    Library(
        "dcn_v2 _dcn_v2 dcn DCN MultiScaleDeformableAttention inplace_abn",
        "dcnv2 inplace-abn",
        "it is compiled for CUDA; torchvision.ops.deform_conv2d, or mmcv built for NPUs",
    ),
    Library(
        "warpctc_pytorch warprnnt_pytorch warp_rnnt",
        "warpctc-pytorch warprnnt-pytorch",
        "it is compiled for CUDA or the CPU; torch.nn.CTCLoss and torchaudio's rnnt_loss",
    ),
    Library(
        "fast_transformers lightseq turbo_transformers fastertransformer",
        "lightseq",
        f"its kernels are compiled for CUDA; {_ATTENTION}",
    ),
    Library(
        "isaacgym isaacsim omni.isaac isaaclab warp",
        "isaacgym isaacsim* warp-lang",
        "the simulator runs on NVIDIA GPUs only",
    ),
    Library(
        "cutlass cute nvmath nvshmem nixl",
        "nvidia-cutlass* nvmath-python nvidia-nvshmem*",
        f"it is for NVIDIA GPUs; {_TORCH}",
    ),
    Library(
        "auto_gptq gptqmodel awq exllamav2 exllama_kernels hqq_aten",
        "auto-gptq gptqmodel autoawq* exllamav2",
        "its kernels are compiled for CUDA; load the model in bf16",
    ),
    Library(
        "cv2.cuda cv2.cuda_GpuMat cv2.cuda_Stream cv2.cudacodec",
        "",
        "OpenCV's CUDA part; the functions of cv2 itself run on the CPU",
    ),
    Library(
        "",
        "onnxruntime-gpu",
        "onnxruntime runs on the CPU, onnxruntime-cann on NPUs",
    ),
    Library(
        "",
        "tensorflow-gpu",
        "TensorFlow for CUDA; tensorflow runs on the CPU",
    ),
    Library(
        "",
        "apex nvidia-apex",
        "xamp takes Apex's place; leave it out",
    ),
    Library(
        "",
        "cudatoolkit* cuda-toolkit pytorch-cuda cudnn nccl cuda-nvcc* cuda-cudart* cuda cuda-runtime "
        "cuda-libraries* magma-cuda* cuda-version cuda-compat* nvidia-cuda* nvidia-cudnn* nvidia-cublas* "
        "nvidia-cufft* nvidia-curand* nvidia-cusolver* nvidia-cusparse* nvidia-nccl* nvidia-nvtx* "
        "nvidia-nvjitlink* nvidia-cufile* libcudnn* libnccl* cuda-toolkit-* nvidia-pyindex nvidia-driver* "
        "nvidia-container-toolkit nvidia-docker*",
        "a part of CUDA; an NPU machine needs CANN and its driver",
    ),
    Library(
        "",
        "torch-npu*",
        "torch's part for NPUs; leave it out on another device",
    ),
    Library(
        "acl acllite te.platform te.lang te.tik te.tvm tbe",
        "",
        "a part of CANN; xamp.accel has what torch.cuda has of a runtime",
    ),
    Library(
        "hccl npu_bridge npu_device",
        "npu-bridge npu-device",
        "Ascend's adapter of TensorFlow; on another device leave it out",
    ),
    Library(
        "torchair",
        "torchair",
        "torch.compile for NPUs; on another device leave backend= out",
    ),
    Library(
        "mindspeed mindspeed_llm mindspeed_mm mindspeed_rl modellink",
        "mindspeed*",
        "Ascend's additions to Megatron-LM; import it only where xamp.device_type() is npu",
    ),
    Library(
        "mindie mindiesd mindietorch ais_bench",
        "mindie* ais-bench",
        "Ascend's engines for inference; torch itself runs on every device",
    ),
    Library(
        "mx_driving",
        "mx-driving*",
        "Ascend's DrivingSDK; on CUDA mmcv and spconv have such operators",
    ),
    Library(
        "msprobe ptdbg_ascend mstx",
        "mindstudio-probe ptdbg-ascend",
        "Ascend's tools for finding errors; xamp compare looks for the first difference on every device",
    ),
)
"""The libraries. Imports of one are marked where nothing catches their failure, and told of where something does."""

_BUILD = f"an extension that is built for CUDA runs on nothing else; {_TORCH}, or build a form for each other device"
_PROFILE = "records CUDA's kernels only; on an NPU torch_npu.profiler.profile with ProfilerActivity.NPU records its own"

CALLS = {
    "torch.version.cuda": Name(
        "None where torch has no CUDA, so what reads it must bear None; xamp.device_type() names the device in use"
    ),
    "torch.profiler.ProfilerActivity.CUDA": Name(_PROFILE),
    "torch.autograd.ProfilerActivity.CUDA": Name(_PROFILE),
    "torch.autograd.profiler.emit_nvtx": Name(
        "NVTX is NVIDIA's; xamp.accel.nvtx marks ranges on every device", never_runs=True
    ),
    "torch.utils.cpp_extension.CUDAExtension": Name(_BUILD, never_runs=True),
    "torch.utils.cpp_extension.CUDA_HOME": Name("the folder of CUDA; None on a machine without"),
    "torch.distributed.ProcessGroupNCCL": Name(
        "NCCL's own class; torch.distributed makes the one of the device in use", never_runs=True
    ),
}
"""Names that use CUDA, of modules that work on other devices too."""

COMMANDS = {
    "nvidia-smi": "npu-smi info shows NPUs; in Python, xamp.accel.mem_get_info() and get_device_name() answer",
    "nvcc": "CUDA's compiler, which an NPU machine does not have",
    "nvprof": "NVIDIA's profiler; on an NPU msprof, or torch_npu.profiler",
    "nsys": "NVIDIA's profiler; on an NPU msprof, or torch_npu.profiler",
    "ncu": "NVIDIA's profiler; on an NPU msprof, or torch_npu.profiler",
    "nvidia-docker": "Ascend Docker Runtime takes its place: docker run -e ASCEND_VISIBLE_DEVICES=0",
    "nvidia-cuda-mps-control": "NVIDIA's only; processes on an NPU need nothing of it",
    "cuda-memcheck": "for CUDA's kernels only",
    "compute-sanitizer": "for CUDA's kernels only",
    "cuda-gdb": "for CUDA's kernels only",
    "nvtop": "npu-smi info watches NPUs",
    "trtexec": "TensorRT's; on an NPU Ascend's ATC converts ONNX",
    "npu-smi": "nvidia-smi shows GPUs; in Python, xamp.accel.mem_get_info() and get_device_name() answer",
    "msnpureport": "the NPU driver's tool for its logs; only a machine with NPUs has it",
    "msprof": "Ascend's profiler; torch.profiler takes the activities of the device in use",
}
"""Programs that come with a vendor's driver or toolkit -> what to use."""

_RANKS = "NCCL's settings are read by NCCL only; HCCL's are HCCL_SOCKET_IFNAME, HCCL_IF_IP and HCCL_CONNECT_TIMEOUT"
_RAY = "keeps Ray from setting {0}_VISIBLE_DEVICES; for {1} it is RAY_EXPERIMENTAL_NOSET_{2}_VISIBLE_DEVICES"
_BUILDING = "is for building CUDA extensions, which run on CUDA only"
_CONTAINER = "is read by NVIDIA's container runtime; Ascend Docker Runtime reads ASCEND_VISIBLE_DEVICES"

ATTRIBUTES = {
    "__cuda_array_interface__": "shares memory of CUDA with CuPy; torch.utils.dlpack shares that of any device",
}
"""Names of attributes, whatever has them -> what to do."""

VARIABLES = {
    "CUDA_VISIBLE_DEVICES": Variable(
        "ASCEND_RT_VISIBLE_DEVICES",
        "CUDA_VISIBLE_DEVICES hides CUDA's devices only; set ASCEND_RT_VISIBLE_DEVICES beside it, whose numbers must "
        "ascend, or choose by XAMP_DEVICE on all",
        is_certain=True,
    ),
    "CUDA_LAUNCH_BLOCKING": Variable(
        "ASCEND_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING is CUDA's; ASCEND_LAUNCH_BLOCKING is read on an NPU", True
    ),
    "PYTORCH_CUDA_ALLOC_CONF": Variable(
        "PYTORCH_NPU_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF is CUDA's; torch_npu reads PYTORCH_NPU_ALLOC_CONF, which knows some of its words",
    ),
    "CUDA_HOME": Variable(text=f"CUDA_HOME {_BUILDING}"),
    "CUDA_PATH": Variable(text=f"CUDA_PATH {_BUILDING}"),
    "CUDA_ROOT": Variable(text=f"CUDA_ROOT {_BUILDING}"),
    "CUDACXX": Variable(text=f"CUDACXX {_BUILDING}"),
    "FORCE_CUDA": Variable(text=f"FORCE_CUDA {_BUILDING}"),
    "TORCH_CUDA_ARCH_LIST": Variable(text=f"TORCH_CUDA_ARCH_LIST {_BUILDING}"),
    "TORCH_NVCC_FLAGS": Variable(text=f"TORCH_NVCC_FLAGS {_BUILDING}"),
    "NVIDIA_VISIBLE_DEVICES": Variable("ASCEND_VISIBLE_DEVICES", f"NVIDIA_VISIBLE_DEVICES {_CONTAINER}"),
    "NVIDIA_DRIVER_CAPABILITIES": Variable(text=f"NVIDIA_DRIVER_CAPABILITIES {_CONTAINER}"),
    "NCCL_SOCKET_IFNAME": Variable("HCCL_SOCKET_IFNAME", _RANKS),
    "NCCL_IB_DISABLE": Variable(text=_RANKS),
    "NCCL_IB_HCA": Variable(text=_RANKS),
    "NCCL_P2P_DISABLE": Variable(text=_RANKS),
    "CUDA_DEVICE_ORDER": Variable(),
    "CUDA_MODULE_LOADING": Variable(),
    "CUDA_CACHE_PATH": Variable(),
    "CUDA_CACHE_DISABLE": Variable(),
    "CUDA_CACHE_MAXSIZE": Variable(),
    "CUDA_DEVICE_MAX_CONNECTIONS": Variable(),
    "CUBLAS_WORKSPACE_CONFIG": Variable(),
    "CUDNN_DETERMINISTIC": Variable(),
    "NVIDIA_TF32_OVERRIDE": Variable(),
    "NVIDIA_PYTORCH_VERSION": Variable(),
    "ASCEND_RT_VISIBLE_DEVICES": Variable(
        "CUDA_VISIBLE_DEVICES",
        "ASCEND_RT_VISIBLE_DEVICES hides NPUs only; set CUDA_VISIBLE_DEVICES beside it, or choose by XAMP_DEVICE",
    ),
    "ASCEND_LAUNCH_BLOCKING": Variable(
        "CUDA_LAUNCH_BLOCKING", "ASCEND_LAUNCH_BLOCKING is Ascend's; CUDA_LAUNCH_BLOCKING is read on CUDA"
    ),
    "PYTORCH_NPU_ALLOC_CONF": Variable(
        "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF is torch_npu's; CUDA's is PYTORCH_CUDA_ALLOC_CONF"
    ),
    "ASCEND_VISIBLE_DEVICES": Variable(
        "NVIDIA_VISIBLE_DEVICES",
        "ASCEND_VISIBLE_DEVICES is read by Ascend Docker Runtime; NVIDIA's container runtime reads "
        "NVIDIA_VISIBLE_DEVICES",
    ),
    "HCCL_SOCKET_IFNAME": Variable(
        "NCCL_SOCKET_IFNAME", "HCCL's settings are read by HCCL only; NCCL's are NCCL_SOCKET_IFNAME and its like"
    ),
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": Variable(
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", _RAY.format("ASCEND_RT", "GPUs", "CUDA")
    ),
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": Variable(
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES", _RAY.format("CUDA", "NPUs", "ASCEND_RT")
    ),
    "P2P_HCCL_BUFFSIZE": Variable(),
    "TASK_QUEUE_ENABLE": Variable(),
    "COMBINED_ENABLE": Variable(),
    "ACLNN_CACHE_LIMIT": Variable(),
    "MULTI_STREAM_MEMORY_REUSE": Variable(),
}
"""Environment variables. What begins with one of :data:`PREFIXES` and is not here is read by that software only."""

PREFIXES = ("NCCL_", "TORCH_NCCL_", "HCCL_", "ASCEND_", "VLLM_ASCEND_")

RESOURCE = "Ray's name for NPUs, which it schedules as a resource; GPUs are num_gpus"
"""What to do where Ray is asked for NPUs."""

TEXTS = (
    (
        r"\w*cuda\w*\.so\b",
        "this may be a library that is compiled for CUDA; another device needs its own, or torch's own operators",
    ),
    (
        r"\blibcu(da|dart|dnn|blas|fft|rand|solver|sparse)\w*\.so|\bnvcuda\.dll|\bcudart64\w*\.dll",
        "a library of CUDA, which is not there on an NPU machine",
    ),
    (
        r"/usr/local/cuda|/opt/cuda|/usr/lib/cuda|\bcuda/(lib64|include|bin)\b",
        "a folder of CUDA, which is not there on an NPU machine; CANN's set_env.sh sets its own paths",
    ),
    (
        r"\b(?:module\s+(?:load|add|swap|switch)|ml)\s(?:.*\s)?(?:cuda|cudnn|nccl|nvhpc)\b\S*",
        "a cluster's module of CUDA; on an NPU machine CANN's set_env.sh sets what is needed",
    ),
    (
        r"\bnvidia/(cuda|cudagl|pytorch)\b|\bnvcr\.io/|\bpytorch/pytorch:\S*cuda",
        "an image with CUDA; an NPU needs one with CANN and torch_npu",
    ),
    (
        r"\bdownload\.pytorch\.org/whl/(\w+/)?cu\d+|\bwhl/cu\d{2,3}\b|[+]cu\d{2,3}\b|[-_]cuda\d{2,3}\b|\bcu\d{3}\b",
        "a build for CUDA; an NPU needs torch's build for the CPU, and torch-npu of the same version",
    ),
    (
        r"\b(?:docker|podman|nerdctl)\b.*\s--gpus\b",
        "NVIDIA's container runtime; Ascend Docker Runtime takes its place: docker run -e ASCEND_VISIBLE_DEVICES=0",
    ),
    (r"\bgithub\.com[:/]nvidia/apex\b|\bapex\.git\b", "xamp takes Apex's place; leave it out"),
    (r"\bnvidia\.com/(?:gpu|mig)\b", "Kubernetes knows NPUs as huawei.com/Ascend910, or by your cluster's name"),
    (
        r"--runtime[= ]nvidia\b|\bruntime:\s*[\"']?nvidia\b|\bdriver:\s*[\"']?nvidia\b",
        "NVIDIA's container runtime; Ascend Docker Runtime takes its place",
    ),
    (
        r"\b(CUDA|Tensorrt|TensorRT)ExecutionProvider\b",
        "onnxruntime's part for CUDA; CANNExecutionProvider is Ascend's, CPUExecutionProvider runs everywhere",
    ),
    (r"\b(self_)?cuda_(time|memory)(_total|_usage)?\b", "a figure of CUDA's profile; newer torch names it device_..."),
    (
        r"(?:/usr/local/Ascend|/etc/Ascend|/var/log/npu)\b\S*|\bascend-toolkit\b|/Ascend/\w[\w-]*/",
        "a folder of CANN or of its driver, which only a machine with NPUs has",
    ),
    (r"[\"']NPU[\"']\s*:", RESOURCE),
    (r"/dev/(?:davinci|devmm_svm|hisi_hdc)\w*", "a card of Ascend; NVIDIA's container runtime gives GPUs by --gpus"),
    (r"\bhuawei\.com/Ascend\w*", "Kubernetes knows GPUs as nvidia.com/gpu"),
    (r"\bCANNExecutionProvider\b", "onnxruntime's part for Ascend; CPUExecutionProvider runs everywhere"),
)
"""Patterns in texts of any file -> what to do."""
