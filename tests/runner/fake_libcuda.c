/* A fake of the CUDA driver's virtual memory management: the declarations are those of cuda.h, a handle is a memfd, and
 * what is mapped is mapped for real, in host memory. It refuses whatever the driver would. */
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef struct { int type; int id; } CUmemLocation;
typedef struct {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;

enum { INVALID = 1, OUT_OF_MEMORY = 2, GRANULE = 2 << 20 };
static const size_t TOTAL = 64 << 20;
size_t fake_taken;

static int is_wrong(const CUmemAllocationProp *p)
{
    return p->type != 1 || p->requestedHandleTypes != 1 || p->location.type != 1 || p->location.id != 0 ||
           p->win32HandleMetaData || p->allocFlags.compressionType || p->allocFlags.usage;
}

int cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *p, int option)
{
    *granularity = GRANULE;
    return is_wrong(p) || option != 0 ? INVALID : 0;
}

int cuMemAddressReserve(u64 *address, size_t size, size_t alignment, u64 wanted, u64 flags)
{
    if (!size || size % GRANULE || alignment || wanted || flags) return INVALID;
    *address = (u64)mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return 0;
}

int cuMemCreate(u64 *handle, size_t size, const CUmemAllocationProp *p, u64 flags)
{
    if (is_wrong(p) || !size || size % GRANULE || flags) return INVALID;
    if (fake_taken + size > TOTAL) return OUT_OF_MEMORY;
    fake_taken += size;
    int fd = memfd_create("fake", 0);
    if (ftruncate(fd, (off_t)size)) return INVALID;
    *handle = 0x100000000ULL + (u64)fd; /* more than 32 bits */
    return 0;
}

static int fd_of(u64 handle) { return (int)(handle - 0x100000000ULL); }

int cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags)
{
    if (offset || flags || (off_t)size > lseek(fd_of(handle), 0, SEEK_END)) return INVALID;
    void *at = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, fd_of(handle), 0);
    return at == (void *)address ? 0 : INVALID;
}

int cuMemSetAccess(u64 address, size_t size, const CUmemAccessDesc *access, size_t count)
{
    if (count != 1 || access->location.type != 1 || access->location.id != 0) return INVALID;
    if (access->flags != 1 && access->flags != 3) return INVALID;
    return mprotect((void *)address, size, access->flags == 3 ? PROT_READ | PROT_WRITE : PROT_READ) ? INVALID : 0;
}

int cuMemUnmap(u64 address, size_t size)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    return mmap((void *)address, size, PROT_NONE, flags, -1, 0) == (void *)address ? 0 : INVALID;
}

int cuMemRelease(u64 handle)
{
    off_t size = lseek(fd_of(handle), 0, SEEK_END);
    if (size <= 0) return INVALID;
    fake_taken -= (size_t)size;
    return close(fd_of(handle)) ? INVALID : 0;
}

int cuMemExportToShareableHandle(void *out, u64 handle, int type, u64 flags)
{
    if (type != 1 || flags) return INVALID;
    *(int *)out = dup(fd_of(handle));
    return 0;
}

int cuMemImportFromShareableHandle(u64 *handle, void *fd, int type)
{
    if (type != 1) return INVALID;
    off_t size = lseek((int)(size_t)fd, 0, SEEK_END);
    if (size <= 0) return INVALID;
    fake_taken += (size_t)size; /* given back by the release of this handle, which counts for itself here */
    *handle = 0x100000000ULL + (u64)dup((int)(size_t)fd);
    return 0;
}

int cuMemAddressFree(u64 address, size_t size)
{
    return munmap((void *)address, size) ? INVALID : 0;
}

int cuGetErrorString(int error, const char **text)
{
    *text = error == INVALID ? "invalid argument" : "another";
    return 0;
}
