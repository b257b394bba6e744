/* A libcudnn.so that fails in one way: -DCRASH, HANG, OLD, GARBAGE, REFUSE or EMPTY. Without any of these it
 * returns one configuration of 4096 bytes. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef OLD
size_t cudnnGetVersion(void) { return 90701; }
#else
size_t cudnnGetVersion(void) { return 92400; }
#endif
const char *cudnnGetErrorString(int status) { return status ? "CUDNN_STATUS_OF_ITS_OWN" : "fine"; }
void cudnnGetLastErrorString(char *message, size_t room) { snprintf(message, room, "because"); }

int cudnnBackendCreateDescriptor(int type, void **descriptor)
{
    *descriptor = calloc(1, sizeof(int));
    *(int *)*descriptor = type;
    return 0;
}

int cudnnBackendDestroyDescriptor(void *descriptor)
{
    free(descriptor);
    return 0;
}

int cudnnBackendSetAttribute(void *descriptor, int name, int type, int64_t count, const void *values)
{
    (void)descriptor, (void)name, (void)type, (void)count, (void)values;
    return 0;
}

int cudnnBackendFinalize(int *descriptor)
{
    if (*descriptor != 4) /* heuristics */
        return 0;
#ifdef CRASH
    abort();
#endif
#ifdef HANG
    sleep(600);
#endif
#ifdef GARBAGE
    if (write(0, "{\"configurations\":[[-1.5]]}\n", 27) < 0)
        abort();
#endif
#ifdef REFUSE
    return 3000;
#endif
    return 0;
}

int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t wanted, int64_t *found,
                             void *values)
{
    (void)descriptor, (void)wanted;
    *found = 1;
    if (values && name == 303)
        *(int64_t *)values = 4096;
    if (type == 11 || type == 19)
        *found = 0;
#ifdef EMPTY
    *found = 0;
#endif
    return 0;
}
