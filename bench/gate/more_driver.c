/* Appended to null_cuda's driver.c, in which pretend.sh renames what is defined anew here: the words of a real driver,
   by which programs tell that memory ran out, and the address range that vLLM's sleep mode gives back. Unmapping what is
   not mapped fails as on a real driver: vLLM's pool goes on to release a stale handle where it does not. */
#undef cuGetErrorString
#undef cuMemUnmap
CUresult cuGetErrorString(CUresult e,const char**s){*s=e==2?"out of memory":e==0?"no error":"null_cuda error";return 0;}
CUresult cuMemAddressFree(CUdeviceptr p,size_t n){return 0;} /* addresses are not used again */
#define SEGMENTS 65536
static CUdeviceptr mapped[SEGMENTS]; /* 0 is a free place */
static int place_of(CUdeviceptr p){for(int i=0;i<SEGMENTS;i++)if(mapped[i]==p)return i;return -1;}
CUresult cuMemMap(CUdeviceptr p,size_t n,size_t at,CUmemGenericAllocationHandle h,unsigned long long f)
{
    int free_place=place_of(0);
    if(!p||free_place<0||place_of(p)>=0)return 1;
    mapped[free_place]=p;
    return 0;
}
CUresult cuMemUnmap(CUdeviceptr p,size_t n)
{
    int place=p?place_of(p):-1;
    if(place<0)return 1;
    mapped[place]=0;
    return replaced_cuMemUnmap(p,n);
}
