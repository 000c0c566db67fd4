/* Appended to null_cuda's runtime.c, in which pretend.sh renames what is defined anew here. First, names that vLLM's
   sleep mode looks up by itself, so that no linker asks for them. */
#undef cudaMemcpyAsync
#undef cudaMemcpy
cudaError_t cudaDeviceReset(void){return OK;}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*h,void*p){return OK;}
cudaError_t cudaIpcOpenMemHandle(void**p,cudaIpcMemHandle_t h,unsigned f){return OK;}
/* With NULL_CUDA_READ_ZEROS what is read from the card is zero. Kernels compute nothing, so what is read is otherwise
   what an earlier tensor left in the same place: unequal ids where equal ones are meant. Without torch's cache, which
   the memory pool of sleep mode is part of, all memory is fresh and so zero; with it, this is needed. */
static int zeros(const void*s,const void*d){static int on=-1; if(on<0)on=getenv("NULL_CUDA_READ_ZEROS")!=0; return on&&isdev(s)&&!isdev(d);}
cudaError_t cudaMemcpy(void*d,const void*s,size_t n,enum cudaMemcpyKind k){if(zeros(s,d)){memset(d,0,n);return OK;} return cp(d,s,n);}
cudaError_t cudaMemcpyAsync(void*d,const void*s,size_t n,enum cudaMemcpyKind k,cudaStream_t st){return cudaMemcpy(d,s,n,k);}
