// A CUDA runtime and driver with one H100 that does nothing: torch then traces fake tensors as on a GPU.
//   gcc -shared -fPIC -w -I CUDA/include no_gpu.c -Wl,-soname,libcuda.so.1 -o libcuda.so.1
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#define OK return 0
#define DO(name) __asm__(".globl " #name "\n.set " #name ", nothing");  // without the prototype of its header
int nothing() { OK; }

cudaError_t cudaGetDeviceCount(int *n) { *n = 1; OK; }
cudaError_t cudaGetDevice(int *d) { *d = 0; OK; }
cudaError_t cudaSetDevice(int d) { OK; }
cudaError_t cudaDriverGetVersion(int *v) { *v = 13000; OK; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = 13000; OK; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3");
  p->major = 9; p->minor = 0; p->multiProcessorCount = 132; p->warpSize = 32;
  p->totalGlobalMem = 80ull << 30; p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->maxThreadsPerBlock = 1024; p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = 232448; p->sharedMemPerMultiprocessor = 233472;
  p->l2CacheSize = 50 << 20; p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64; p->memoryBusWidth = 5120;
  OK;
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) { *v = 0; OK; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *a, int *b) { *a = 0; *b = -5; OK; }
cudaError_t cudaMemGetInfo(size_t *f, size_t *t) { *f = *t = 80ull << 30; OK; }
cudaError_t cudaMalloc(void **p, size_t n) { *p = aligned_alloc(512, (n + 511) / 512 * 512); OK; }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) { *p = aligned_alloc(512, (n + 511) / 512 * 512); OK; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = 0; OK; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { *s = (cudaStream_t)8; OK; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { *s = (cudaStream_t)8; OK; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { *e = (cudaEvent_t)8; OK; }
cudaError_t cudaDeviceCanAccessPeer(int *v, int a, int b) { *v = 0; OK; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { OK; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *n, void **f, unsigned v, unsigned long long fl,
                                             enum cudaDriverEntryPointQueryResult *r) {
  *f = (void *)nothing; if (r) *r = cudaDriverEntryPointSuccess; OK;
}
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { *f = 0; *a = 1; return 0; }
int cuInit(unsigned f) { return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int o) { *d = 0; return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
DO(cudaFree) DO(cudaGetLastError) DO(cudaPeekAtLastError) DO(cudaDeviceSynchronize) DO(cudaEventDestroy)
DO(cudaEventRecord) DO(cudaEventRecordWithFlags) DO(cudaEventQuery) DO(cudaEventSynchronize) DO(cudaStreamSynchronize)
DO(cudaStreamWaitEvent) DO(cudaStreamQuery) DO(cudaMemcpyAsync) DO(cudaMemcpy) DO(cudaLaunchKernel)
DO(cudaLaunchKernelExC) DO(cudaMemsetAsync) DO(cudaFuncSetAttribute) DO(cudaDeviceEnablePeerAccess)
DO(cudaDeviceGetDefaultMemPool) DO(cudaDeviceGetGraphMemAttribute) DO(cudaDeviceGetPCIBusId)
DO(cudaDeviceSetGraphMemAttribute) DO(cudaEventCreate) DO(cudaEventElapsedTime) DO(cudaFreeAsync) DO(cudaFreeHost)
DO(cudaFuncGetAttributes) DO(cudaGetSymbolAddress) DO(cudaGraphAddNode) DO(cudaGraphConditionalHandleCreate)
DO(cudaGraphDestroy) DO(cudaGraphExecDestroy) DO(cudaGraphGetNodes) DO(cudaGraphInstantiateWithFlags)
DO(cudaGraphLaunch) DO(cudaGraphNodeGetDependencies) DO(cudaGraphRetainUserObject) DO(cudaHostRegister)
DO(cudaHostUnregister) DO(cudaIpcCloseMemHandle) DO(cudaIpcGetEventHandle) DO(cudaIpcGetMemHandle)
DO(cudaIpcOpenEventHandle) DO(cudaIpcOpenMemHandle) DO(cudaKernelSetAttributeForDevice) DO(cudaLaunchHostFunc)
DO(cudaLibraryGetKernel) DO(cudaLibraryLoadData) DO(cudaLibraryUnload) DO(cudaMallocAsync) DO(cudaMemPoolGetAttribute)
DO(cudaMemPoolSetAccess) DO(cudaMemPoolSetAttribute) DO(cudaMemPoolTrimTo) DO(cudaMemcpy2DAsync)
DO(cudaMemcpyPeerAsync) DO(cudaMemcpyToSymbol) DO(cudaMemset)
DO(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags) DO(cudaPointerGetAttributes) DO(cudaProfilerStart)
DO(cudaProfilerStop) DO(cudaStreamAddCallback) DO(cudaStreamBeginCapture) DO(cudaStreamBeginCaptureToGraph)
DO(cudaStreamCreate) DO(cudaStreamDestroy) DO(cudaStreamEndCapture) DO(cudaStreamGetCaptureInfo)
DO(cudaStreamGetPriority) DO(cudaStreamUpdateCaptureDependencies) DO(cudaUserObjectCreate) DO(cudaUserObjectRelease)
DO(cuCtxGetCurrent) DO(cuCtxSetCurrent) DO(cuDeviceGetAttribute) DO(cuDevicePrimaryCtxRetain) DO(cuFuncGetAttribute)
DO(cuFuncSetAttribute) DO(cuFuncSetCacheConfig) DO(cuGetErrorString) DO(cuLaunchCooperativeKernel) DO(cuLaunchKernel)
DO(cuLinkAddData_v2) DO(cuLinkComplete) DO(cuLinkCreate_v2) DO(cuModuleGetFunction) DO(cuModuleLoad)
DO(cuModuleLoadData) DO(cuModuleLoadDataEx) DO(cuModuleUnload) DO(cuOccupancyMaxActiveBlocksPerMultiprocessor)
DO(cuPointerGetAttribute) DO(cuTensorMapEncodeTiled)
