/* Appended to null_cuda's runtime.c: names that vLLM's sleep mode looks up by itself, so that no linker asks for them. */
cudaError_t cudaDeviceReset(void){return OK;}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*h,void*p){return OK;}
cudaError_t cudaIpcOpenMemHandle(void**p,cudaIpcMemHandle_t h,unsigned f){return OK;}
