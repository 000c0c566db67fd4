/* Appended to null_cuda's driver.c, in which pretend.sh renames what is defined anew here: the words of a real driver,
   by which programs tell that memory ran out, and the address range that vLLM's sleep mode gives back. */
#undef cuGetErrorString
CUresult cuGetErrorString(CUresult e,const char**s){*s=e==2?"out of memory":e==0?"no error":"null_cuda error";return 0;}
CUresult cuMemAddressFree(CUdeviceptr p,size_t n){return 0;} /* addresses are not used again */
