/* A stand-in for CANN, the driver and runtime of Ascend cards, on a machine that has none.
 *
 * torch_npu loads it in place of CANN. It manages what a runtime manages: devices, memory, streams, events, options.
 * Host memory serves as device memory. Work is done when a call returns, so a stream is only a name and an event only
 * a time. It computes nothing: Python kernels compute the operators. A call that would launch one here is refused.
 *
 * All functions are in this one library, because the current device must exist only once. Three environment variables
 * describe the machine: XAMP_EMULATED_SOC names the chip, XAMP_EMULATED_DEVICES gives the number of cards, and
 * XAMP_EMULATED_MEMORY the GiB of each.
 */

#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Numbers of CANN's interface: what torch_npu and users' scripts compare with. */
enum {
    SUCCESS = 0,
    ERROR_INVALID_PARAM = 100000,
    ERROR_INVALID_DEVICE = 107001,
    ERROR_NO_CONTEXT = 107002,
    ERROR_NOT_SERVED = 207000,
    ERROR_OUT_OF_MEMORY = 207001,
    ERROR_INTERNAL = 500000,
    ERROR_VECTOR_CORE = 507035,
    EVENT_NOT_READY = 0,
    EVENT_COMPLETE = 1,
    MAX_DEVICES = 64,
    MAX_OPTIONS = 64,
    ALIGNMENT = 512,
    PAGE = 4096, /* where host memory begins: torch_npu registers whole pages */
    SPARE_BYTES = 32 /* what torch_npu expects beyond the end of a buffer; its last word says which device's it is */
};

static size_t device_bytes(void) {
    const char *text = getenv("XAMP_EMULATED_MEMORY"); /* GiB */
    size_t gib = text ? (size_t)strtoul(text, NULL, 10) : 0;
    return (gib ? gib : 64) << 30;
}

/* ---- errors ---- */

static __thread char recent_error[512];
static __thread char reported_error[512];

static int fail(int code, const char *what, const char *detail) {
    snprintf(recent_error, sizeof recent_error, "emulated Ascend: %s%s\n", what, detail);
    return code;
}

static int refuse(const char *function) {
    return fail(ERROR_NOT_SERVED, "the stand-in CANN does not serve ", function);
}

/* For what a release of torch_npu asks for and this file does not have: see asked.py. Of ERROR_NOT_SERVED torch_npu
 * only warns in some places, and goes on with what the function has not written. */
int xamp_emulated_refuse(const char *function) {
    refuse(function);
    return ERROR_INTERNAL;
}

/* As in CANN, reading the text clears it. */
const char *aclGetRecentErrMsg(void) {
    memcpy(reported_error, recent_error, sizeof reported_error);
    recent_error[0] = 0;
    return reported_error;
}

/* ---- devices ---- */

typedef struct {
    int index;
    atomic_int used;
    atomic_size_t allocated;
    atomic_int fault; /* of a kernel that has run since; told to whoever waits for the device */
} Device;

static Device devices[MAX_DEVICES];
static __thread int current_device = -1; /* as in CANN, a thread has none until it sets one */

static int count_listed(const char *list) {
    int count = *list ? 1 : 0;
    for (; *list; list++) count += *list == ',';
    return count;
}

static int device_count(void) {
    const char *text = getenv("XAMP_EMULATED_DEVICES");
    const char *visible = getenv("ASCEND_RT_VISIBLE_DEVICES");
    int count = text ? atoi(text) : 1;
    if (count > MAX_DEVICES) count = MAX_DEVICES;
    if (visible && count_listed(visible) < count) count = count_listed(visible);
    return count;
}

int aclrtGetDeviceCount(uint32_t *count) {
    *count = (uint32_t)device_count();
    return SUCCESS;
}

int aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= device_count()) return fail(ERROR_INVALID_DEVICE, "Invalid device ID.", "");
    devices[device].index = device;
    atomic_store(&devices[device].used, 1);
    current_device = device;
    return SUCCESS;
}

int aclrtGetDevice(int32_t *device) {
    if (current_device < 0) return fail(ERROR_NO_CONTEXT, "no device is set on this thread", "");
    *device = current_device;
    return SUCCESS;
}

int aclrtGetCurrentContext(void **context) {
    if (current_device < 0) return fail(ERROR_NO_CONTEXT, "no device is set on this thread", "");
    *context = &devices[current_device];
    return SUCCESS;
}

int aclrtSetCurrentContext(void *context) {
    current_device = (int)((Device *)context - devices);
    return SUCCESS;
}

int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    if (device < 0 || device >= device_count()) return fail(ERROR_INVALID_DEVICE, "Invalid device ID.", "");
    if (flags) *flags = 0;
    *active = atomic_load(&devices[device].used);
    return SUCCESS;
}

const char *aclrtGetSocName(void) {
    const char *name = getenv("XAMP_EMULATED_SOC");
    return name ? name : "Ascend910B2";
}

int aclGetDeviceCapability(uint32_t device, int what, int64_t *value) {
    static const int64_t figures[] = {24, 48, (int64_t)192 << 20}; /* cube cores, vector cores, bytes of L2 cache */
    (void)device;
    if (what < 0 || what > 2) return fail(ERROR_INVALID_PARAM, "unknown device capability", "");
    *value = figures[what];
    return SUCCESS;
}

int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    *can = device != peer;
    return SUCCESS;
}

int aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t *logic) {
    *logic = user;
    return SUCCESS;
}

/* ---- versions ---- */

/* The newest CANN, and a driver of its time, that torch_npu's table of versions names. */
static const char CANN_VERSION[] = "9.1.0";
static const char DRIVER_VERSION[] = "25.5.0";

typedef struct {
    char version[128];
    char parts[4][64]; /* major, minor, release, patch: torch_npu reads the whole alone */
    char reserved[128];
} PackageVersion;

int aclsysGetCANNVersion(int package, PackageVersion *version) {
    enum { DRIVER = 7 };
    memset(version, 0, sizeof *version);
    strcpy(version->version, package == DRIVER ? DRIVER_VERSION : CANN_VERSION);
    return SUCCESS;
}

int aclsysGetVersionStr(const char *package, char *version) {
    strcpy(version, strcmp(package, "driver") ? CANN_VERSION : DRIVER_VERSION);
    return SUCCESS;
}

/* ---- memory ---- */

static int32_t this_device(void) { return current_device < 0 ? 0 : current_device; }

static int32_t *owner(void *pointer) { return (int32_t *)((char *)pointer + malloc_usable_size(pointer)) - 1; }

static int allocate(void **pointer, size_t bytes) {
    size_t whole = (bytes + SPARE_BYTES + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    Device *device = &devices[this_device()];
    if (atomic_load(&device->allocated) + whole > device_bytes() || !(*pointer = aligned_alloc(ALIGNMENT, whole)))
        return fail(ERROR_OUT_OF_MEMORY, "out of device memory", "");
    atomic_fetch_add(&device->allocated, malloc_usable_size(*pointer));
    *owner(*pointer) = this_device();
    return SUCCESS;
}

int aclrtMalloc(void **pointer, size_t bytes, int policy) {
    (void)policy;
    return allocate(pointer, bytes);
}

int aclrtMallocAlign32(void **pointer, size_t bytes, int policy) {
    (void)policy;
    return allocate(pointer, bytes);
}

int aclrtFree(void *pointer) {
    if (pointer) atomic_fetch_sub(&devices[*owner(pointer)].allocated, malloc_usable_size(pointer));
    free(pointer);
    return SUCCESS;
}

int aclrtMallocHost(void **pointer, size_t bytes) {
    size_t whole = (bytes + SPARE_BYTES + PAGE - 1) / PAGE * PAGE; /* a card may use it too, when it is registered */
    *pointer = aligned_alloc(PAGE, whole);
    return *pointer ? SUCCESS : fail(ERROR_OUT_OF_MEMORY, "out of host memory", "");
}

int aclrtFreeHost(void *pointer) {
    free(pointer);
    return SUCCESS;
}

/* Host memory that a card may use. Here a card sees all of it, at the address that the host uses. */
typedef struct Registered {
    void *pointer;
    struct Registered *next;
} Registered;

static Registered *registered;
static pthread_mutex_t registering = PTHREAD_MUTEX_INITIALIZER;

static Registered **find_registered(void *pointer) {
    Registered **found = &registered;
    while (*found && (*found)->pointer != pointer) found = &(*found)->next;
    return found;
}

static int register_host(void *pointer) {
    int code = SUCCESS;
    if (!pointer) return fail(ERROR_INVALID_PARAM, "no host memory to register", "");
    pthread_mutex_lock(&registering);
    Registered **found = find_registered(pointer);
    if (*found) {
        code = fail(ERROR_INVALID_PARAM, "this host memory is registered already", "");
    } else if (!(*found = calloc(1, sizeof **found))) {
        code = fail(ERROR_OUT_OF_MEMORY, "out of host memory", "");
    } else {
        (*found)->pointer = pointer;
    }
    pthread_mutex_unlock(&registering);
    return code;
}

int aclrtHostRegister(void *pointer, uint64_t bytes, int type, void **on_device) {
    (void)bytes, (void)type;
    int code = register_host(pointer);
    if (code == SUCCESS) *on_device = pointer;
    return code;
}

int aclrtHostRegisterV2(void *pointer, uint64_t bytes, uint32_t flag) {
    (void)bytes, (void)flag;
    return register_host(pointer);
}

int aclrtHostUnregister(void *pointer) {
    pthread_mutex_lock(&registering);
    Registered **found = find_registered(pointer), *gone = *found;
    if (gone) *found = gone->next;
    pthread_mutex_unlock(&registering);
    free(gone);
    return gone ? SUCCESS : fail(ERROR_INVALID_PARAM, "this host memory is not registered", "");
}

int aclrtMemcpy(void *target, size_t room, const void *source, size_t bytes, int kind) {
    (void)kind;
    if (bytes > room) return fail(ERROR_INVALID_PARAM, "a copy is larger than its target", "");
    memmove(target, source, bytes);
    return SUCCESS;
}

int aclrtMemcpyAsync(void *target, size_t room, const void *source, size_t bytes, int kind, void *stream) {
    (void)stream;
    return aclrtMemcpy(target, room, source, bytes, kind);
}

int aclrtMemset(void *target, size_t room, int32_t value, size_t bytes) {
    if (bytes > room) return fail(ERROR_INVALID_PARAM, "a fill is larger than its target", "");
    memset(target, value, bytes);
    return SUCCESS;
}

int aclrtMemsetAsync(void *target, size_t room, int32_t value, size_t bytes, void *stream) {
    (void)stream;
    return aclrtMemset(target, room, value, bytes);
}

int aclrtGetMemInfo(int what, size_t *unused, size_t *total) {
    (void)what;
    *total = device_bytes();
    *unused = device_bytes() - atomic_load(&devices[this_device()].allocated);
    return SUCCESS;
}

/* How busy each part of the card is, in percent: nothing is pending here, so nothing is. */
typedef struct {
    int32_t cube, vector, aicpu, memory;
    void *more;
} Utilization;

int aclrtGetDeviceUtilizationRate(int32_t device, Utilization *rate) {
    if (device < 0 || device >= device_count()) return fail(ERROR_INVALID_DEVICE, "Invalid device ID.", "");
    memset(rate, 0, sizeof *rate);
    return SUCCESS;
}

/* ---- one process that drives several cards: what nn.DataParallel asks of HCCL ---- */

/* torch_npu calls a broadcast once for each card, each call in a thread of its own. */
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    const void *root; /* the root's buffer, while a broadcast is in progress */
    uint32_t count, copied;
} Together;

typedef struct {
    Together *together;
    uint32_t rank;
} Communicator;

/* The groups live as long as the process: torch_npu keeps them too. */
int HcclCommInitAll(uint32_t count, int32_t *cards, void **made) {
    Together *together = calloc(1, sizeof *together);
    (void)cards;
    if (together) {
        pthread_mutex_init(&together->lock, NULL);
        pthread_cond_init(&together->changed, NULL);
        together->count = count;
    }
    for (uint32_t rank = 0; together && rank < count; rank++) {
        Communicator *each = calloc(1, sizeof *each);
        if (!each) return fail(ERROR_OUT_OF_MEMORY, "out of host memory", "");
        *each = (Communicator){together, rank};
        made[rank] = each;
    }
    return together ? SUCCESS : fail(ERROR_OUT_OF_MEMORY, "out of host memory", "");
}

int HcclCommDestroy(void *communicator) {
    free(communicator);
    return SUCCESS;
}

int HcclBroadcast(void *buffer, uint64_t count, int type, uint32_t root, void *communicator, void *stream) {
    static const uint8_t sizes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2}; /* of HCCL's data types, int8 to bfloat16 */
    Communicator *own = communicator;
    (void)stream;
    if (type < 0 || type >= (int)sizeof sizes) return fail(ERROR_INVALID_PARAM, "unknown data type", "");
    Together *together = own->together;
    pthread_mutex_lock(&together->lock);
    if (own->rank == root) {
        together->root = buffer;
        pthread_cond_broadcast(&together->changed);
        while (together->copied + 1 < together->count) pthread_cond_wait(&together->changed, &together->lock);
        together->root = NULL;
        together->copied = 0;
    } else {
        while (!together->root) pthread_cond_wait(&together->changed, &together->lock);
        memmove(buffer, together->root, count * sizes[type]);
        together->copied++;
        pthread_cond_broadcast(&together->changed);
    }
    pthread_mutex_unlock(&together->lock);
    return SUCCESS;
}

/* ---- streams and events ---- */

typedef struct {
    int32_t id;
    uint32_t overflow_switch;
} Stream;

/* A card works on while the host goes on. So an event is pending when it is asked for the first time, unless the host
 * has waited since it was recorded. */
typedef struct {
    struct timespec recorded;
    unsigned waits; /* of the host, when it was recorded */
    int pending;
} Event;

static atomic_uint host_waits;

static atomic_int stream_ids;

int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) {
    Stream *made = calloc(1, sizeof *made);
    (void)priority, (void)flag;
    if (!made) return fail(ERROR_OUT_OF_MEMORY, "out of host memory", "");
    made->id = atomic_fetch_add(&stream_ids, 1);
    *stream = made;
    return SUCCESS;
}

int aclrtCreateStream(void **stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

int aclrtDestroyStream(void *stream) {
    free(stream);
    return SUCCESS;
}

int aclrtDestroyStreamForce(void *stream) { return aclrtDestroyStream(stream); }

int aclrtStreamGetId(void *stream, int32_t *id) {
    *id = stream ? ((Stream *)stream)->id : -1;
    return SUCCESS;
}

int aclrtStreamQuery(void *stream, int *status) {
    (void)stream;
    *status = 0; /* complete */
    return SUCCESS;
}

int aclrtSetStreamOverflowSwitch(void *stream, uint32_t on) {
    if (stream) ((Stream *)stream)->overflow_switch = on;
    return SUCCESS;
}

int aclrtGetStreamOverflowSwitch(void *stream, uint32_t *on) {
    *on = stream ? ((Stream *)stream)->overflow_switch : 0;
    return SUCCESS;
}

int aclrtCreateEventWithFlag(void **event, uint32_t flag) {
    (void)flag;
    *event = calloc(1, sizeof(Event));
    return *event ? SUCCESS : fail(ERROR_OUT_OF_MEMORY, "out of host memory", "");
}

int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return aclrtCreateEventWithFlag(event, flag); }

int aclrtDestroyEvent(void *event) {
    free(event);
    return SUCCESS;
}

int aclrtRecordEvent(void *event, void *stream) {
    Event *made = event;
    (void)stream;
    clock_gettime(CLOCK_MONOTONIC, &made->recorded);
    made->waits = atomic_load(&host_waits);
    made->pending = 1;
    return SUCCESS;
}

int aclrtQueryEventStatus(void *event, int *status) {
    Event *asked = event;
    *status = asked->pending && asked->waits == atomic_load(&host_waits) ? EVENT_NOT_READY : EVENT_COMPLETE;
    asked->pending = 0;
    return SUCCESS;
}

int aclrtSynchronizeEvent(void *event) {
    ((Event *)event)->pending = 0;
    return SUCCESS;
}

int aclrtQueryEventWaitStatus(void *event, int *status) {
    (void)event;
    *status = 0; /* here, unlike above, zero is complete */
    return SUCCESS;
}

int aclrtEventElapsedTime(float *milliseconds, void *start, void *end) {
    const struct timespec *from = &((Event *)start)->recorded, *to = &((Event *)end)->recorded;
    *milliseconds = (float)((to->tv_sec - from->tv_sec) * 1e3 + (to->tv_nsec - from->tv_nsec) / 1e6);
    return SUCCESS;
}

/* ---- options ---- */

static char *compile_options[MAX_OPTIONS];
static int64_t system_options[MAX_OPTIONS];

int aclSetCompileopt(int option, const char *value) {
    if (option < 0 || option >= MAX_OPTIONS) return fail(ERROR_INVALID_PARAM, "unknown compile option", "");
    free(compile_options[option]);
    compile_options[option] = strdup(value);
    return SUCCESS;
}

size_t aclGetCompileoptSize(int option) {
    const char *value = option >= 0 && option < MAX_OPTIONS ? compile_options[option] : NULL;
    return value ? strlen(value) + 1 : 1;
}

int aclGetCompileopt(int option, char *value, size_t room) {
    const char *set = option >= 0 && option < MAX_OPTIONS ? compile_options[option] : NULL;
    if (room) snprintf(value, room, "%s", set ? set : "");
    return SUCCESS;
}

int aclrtSetSysParamOpt(int option, int64_t value) {
    if (option < 0 || option >= MAX_OPTIONS) return fail(ERROR_INVALID_PARAM, "unknown system option", "");
    system_options[option] = value;
    return SUCCESS;
}

int aclrtGetSysParamOpt(int option, int64_t *value) {
    if (option < 0 || option >= MAX_OPTIONS) return fail(ERROR_INVALID_PARAM, "unknown system option", "");
    *value = system_options[option];
    return SUCCESS;
}

int aclrtCtxSetSysParamOpt(int option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

/* ---- waiting: all is done already, but a fault of a kernel is told only here ---- */

/* Called by the kernels that read a number or copy to the host. */
void xamp_emulated_waited(void) { atomic_fetch_add(&host_waits, 1); }

void xamp_emulated_fail_later(int device) {
    if (device >= 0 && device < MAX_DEVICES) atomic_store(&devices[device].fault, 1);
}

static int wait_for_device(void) {
    int device = current_device < 0 ? 0 : current_device;
    atomic_fetch_add(&host_waits, 1);
    if (!atomic_exchange(&devices[device].fault, 0)) return SUCCESS;
    return fail(ERROR_VECTOR_CORE, "The vector core execution is abnormal: an index is out of range", "");
}

int aclrtSynchronizeDevice(void) { return wait_for_device(); }
int aclrtSynchronizeDeviceWithTimeout(void) { return wait_for_device(); }
int aclrtSynchronizeStream(void) { return wait_for_device(); }
int aclrtSynchronizeStreamWithTimeout(void) { return wait_for_device(); }

/* ---- what has nothing to do here ---- */

/* Calls that are right as soon as they return: no work is ever left to do, and kernels are not compiled. */
#define DONE(name) \
    int name(void) { return SUCCESS; }

DONE(aclInit)
DONE(aclFinalize)
DONE(aclrtResetDevice)
DONE(aclrtDeviceEnablePeerAccess)
DONE(aclrtStreamWaitEvent)
DONE(aclrtResetEvent)
DONE(aclrtSetStreamFailureMode)
DONE(aclrtSetDeviceSatMode)
DONE(aclrtSetOpExecuteTimeOut)
DONE(aclrtSetOpExecuteTimeOutV2)
DONE(aclrtSetOpWaitTimeout)
DONE(aclrtPeekAtLastError)
DONE(aclrtGetLastError)
DONE(aclAppLog)
DONE(HcclSetConfig)
DONE(MsprofRegisterCallback)
DONE(MsprofReportAdditionalInfo)
DONE(MsprofReportApi)
DONE(MsprofReportCompactInfo)

uint64_t MsprofGetHashId(const char *text, size_t length) {
    (void)text, (void)length;
    return 0;
}

uint64_t MsprofSysCycleTime(void) { return (uint64_t)clock(); }

/* ---- operators ---- */

/* Descriptions of an operator's arguments may be made; running it is what fails, but for those that move bytes. */
#define OPAQUE(name) \
    void *name(void) { return calloc(1, 64); }
#define RELEASE(name)         \
    int name(void *pointer) { \
        free(pointer);        \
        return SUCCESS;       \
    }

OPAQUE(aclopCreateAttr)
OPAQUE(aclCreateTensorDesc)
RELEASE(aclopDestroyAttr)
RELEASE(aclDestroyTensorDesc)
RELEASE(aclDestroyDataBuffer)
DONE(aclopSetAttrBool)
DONE(aclopSetAttrDataType)
DONE(aclopSetAttrFloat)
DONE(aclopSetAttrInt)
DONE(aclopSetAttrListBool)
DONE(aclopSetAttrListFloat)
DONE(aclopSetAttrListInt)
DONE(aclopSetAttrListListInt)
DONE(aclopSetAttrString)
DONE(aclSetTensorDescName)
DONE(aclSetTensorFormat)
DONE(aclSetTensorPlaceMent)
DONE(aclSetTensorShape)

typedef struct {
    void *bytes;
    size_t size;
} DataBuffer;

void *aclCreateDataBuffer(void *bytes, size_t size) {
    DataBuffer *buffer = malloc(sizeof *buffer);
    if (buffer) *buffer = (DataBuffer){bytes, size};
    return buffer;
}

/* torch_npu casts to a storage format by these where it loads a tensor that had one; here all formats are laid out
 * alike, but for their size. */
static int only_moves(const char *operator_name) {
    return !strcmp(operator_name, "Identity") || !strcmp(operator_name, "TransData");
}

int aclopCompileAndExecute(
    const char *operator_name, int inputs, void *const *input_descriptions, DataBuffer *const *from, int outputs,
    void *const *output_descriptions, DataBuffer *const *to) {
    (void)input_descriptions, (void)output_descriptions;
    if (!only_moves(operator_name) || inputs < 1 || outputs != 1) {
        return fail(ERROR_NOT_SERVED, "there is no kernel for the operator ", operator_name);
    }
    size_t size = from[0]->size < to[0]->size ? from[0]->size : to[0]->size;
    memmove(to[0]->bytes, from[0]->bytes, size);
    return SUCCESS;
}

int aclopCompileAndExecuteV2(
    const char *operator_name, int inputs, void **input_descriptions, DataBuffer **from, int outputs,
    void **output_descriptions, DataBuffer **to) {
    return aclopCompileAndExecute(operator_name, inputs, input_descriptions, from, outputs, output_descriptions, to);
}

/* ---- what is refused ---- */

#define REFUSED(name) \
    int name(void) { return refuse(#name); }

REFUSED(aclGetTensorDescDimV2)
REFUSED(aclGetTensorDescFormat)
REFUSED(aclGetTensorDescNumDims)
REFUSED(aclGetTensorDescType)
REFUSED(aclmdlFinalizeDump)
REFUSED(aclmdlInitDump)
REFUSED(aclmdlSetDump)
REFUSED(aclrtBinaryGetFunction)
REFUSED(aclrtBinaryLoadFromData)
REFUSED(aclrtDeviceGetBareTgid)
REFUSED(aclrtFreePhysical)
REFUSED(aclrtGetFunctionAddr)
REFUSED(aclrtMallocPhysical)
REFUSED(aclrtMapMem)
REFUSED(aclrtMemExportToShareableHandle)
REFUSED(aclrtMemImportFromShareableHandle)
REFUSED(aclrtMemSetPidToShareableHandle)
REFUSED(aclrtProcessReport)
REFUSED(aclrtReleaseMemAddress)
REFUSED(aclrtReserveMemAddress)
REFUSED(aclrtUnmapMem)
REFUSED(rtDevBinaryRegister)
REFUSED(rtFunctionRegister)
REFUSED(rtGetC2cCtrlAddr)
REFUSED(rtKernelLaunch)
