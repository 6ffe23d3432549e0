/* A stand-in for the half of torch that is built for CUDA, and for those of CUDA's libraries that are not installed.
 *
 * It is compiled with a list of what the installed torch asks of them, made from its libraries' own tables:
 *
 *     NO_CARD(name)        a function of CUDA's C interfaces: there is no device
 *     REFUSED(name)        a function of torch, in C++: an error of torch's with the function's name
 *     MAKER(name, text)    the same, for one that constructs an object of the class ``text``
 *     TYPE(name, text)     the typeinfo of a class, under which Python's classes are registered
 *     DATA(name, bytes)    other data, zero
 *     THREAD(name, bytes)  the same, for each thread
 *
 * What stands here by hand is not in the list.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    NO_DEVICE = 100, /* cudaErrorNoDevice; no interface of CUDA's has this number for a success */
    PLACE = 256      /* bytes of what a function shows to torch while that is loaded */
};

static const char NOTHING[] = "emulated Ascend: CUDA's half of torch is not there";

static atomic_int torch_is_loaded;

/* While torch is loaded, it registers what is its own with CUDA's half, and makes objects that are the default values
 * of arguments. A function then only shows a place to write to. Python tells the end of it. */
void xamp_emulated_torch_is_loaded(void) { atomic_store(&torch_is_loaded, 1); }

typedef void TorchFails(const char *function, const char *file, uint32_t line, const char *text);

/* Throws c10::Error, which Python gets as RuntimeError. libc10.so is loaded already, but not for all to see. */
static void *no_cuda(const char *function, void *place) {
    char text[512];
    if (!atomic_load(&torch_is_loaded)) return place;
    void *c10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
    TorchFails *fail = c10 ? (TorchFails *)dlsym(c10, "_ZN3c106detail14torchCheckFailEPKcS2_jS2_") : NULL;
    snprintf(text, sizeof text, "%s, and %s was called", NOTHING, function);
    if (fail) fail(function, "cuda.c", 0, text);
    fprintf(stderr, "%s\n", text);
    abort();
}

/* int8_t c10::cuda::device_count() noexcept: torch.cuda asks it whether there is a card. */
int8_t _ZN3c104cuda12device_countEv(void) { return 0; }

const char *cudaGetErrorString(int error) { return (void)error, NOTHING; }
const char *cudaGetErrorName(int error) { return (void)error, NOTHING; }

int cuptiGetResultString(int result, const char **text) {
    (void)result;
    *text = NOTHING;
    return 0;
}

/* The virtual functions of a class and of its typeinfo: torch keeps the objects that it makes, and uses none. */
static void nothing(void) {}
#define FUNCTIONS nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing
static void (*const types[])(void) = {FUNCTIONS};

#define NO_CARD(name) \
    int name(void) { return NO_DEVICE; }
#define REFUSED(name)                 \
    void *name(void) {                \
        static char place[PLACE];     \
        return no_cuda(#name, place); \
    }
#define MAKER(name, text)                                                            \
    void name(void **object) {                                                       \
        static const void *const type[] = {types, text};                             \
        static const void *const class[] = {0, type, FUNCTIONS}; /* as C++ lays it out */ \
        *object = no_cuda(#name, (void *)&class[2]);                                 \
    }
#define TYPE(name, text) const void *const name[16] = {types, text};
#define DATA(name, bytes) char name[bytes] __attribute__((aligned(16)));
#define THREAD(name, bytes) __thread char name[bytes] __attribute__((aligned(16)));
