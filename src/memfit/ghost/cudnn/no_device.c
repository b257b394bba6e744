/* A libcuda.so.1 for the process that queries cuDNN (server.py). Every function reports that there is no
 * device, as NVIDIA's own does without one. cuDNN offers the engines that it compiles at run time only if it
 * finds these functions, and calls none of them in its heuristics. While this library is loaded, no
 * other libcuda.so.1 is.
 *
 * Source: the names that cuDNN 9.24 and 9.28 report as missing ("Could not load symbol") when a libcuda.so.1
 * has none of them; server.py reports any that another version misses.
 */
#define NO_DEVICE(function)                                                                                  \
    __attribute__((visibility("default"))) int function(void) { return 100; } /* CUDA_ERROR_NO_DEVICE */

NO_DEVICE(cuCtxGetCurrent)
NO_DEVICE(cuCtxGetLimit)
NO_DEVICE(cuCtxPopCurrent)
NO_DEVICE(cuCtxPushCurrent)
NO_DEVICE(cuDeviceGet)
NO_DEVICE(cuDeviceGetCount)
NO_DEVICE(cuDriverGetVersion)
NO_DEVICE(cuGetErrorName)
NO_DEVICE(cuGetErrorString)
NO_DEVICE(cuKernelGetAttribute)
NO_DEVICE(cuKernelSetAttribute)
NO_DEVICE(cuLaunchCooperativeKernel)
NO_DEVICE(cuLaunchKernel)
NO_DEVICE(cuLaunchKernelEx)
NO_DEVICE(cuLibraryGetKernel)
NO_DEVICE(cuLibraryLoadData)
NO_DEVICE(cuLibraryLoadFromFile)
NO_DEVICE(cuLibraryUnload)
NO_DEVICE(cuLinkAddData)
NO_DEVICE(cuLinkComplete)
NO_DEVICE(cuLinkCreate)
NO_DEVICE(cuLinkDestroy)
NO_DEVICE(cuModuleGetFunction)
NO_DEVICE(cuModuleLoadData)
NO_DEVICE(cuModuleUnload)
NO_DEVICE(cuOccupancyMaxPotentialClusterSize)
NO_DEVICE(cuStreamGetCtx)
NO_DEVICE(cuTensorMapEncodeIm2col)
NO_DEVICE(cuTensorMapEncodeTiled)
