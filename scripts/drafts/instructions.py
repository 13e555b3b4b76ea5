NS=[8,16,24,32,48,64,128]
out=['#include <cstdio>','#include <cstdint>','#include <cuda_runtime.h>','''
#define D __device__ __forceinline__
D uint32_t sm(){ extern __shared__ __align__(1024) char b[]; return (uint32_t)__cvta_generic_to_shared(b);}
D uint64_t op(uint32_t a,uint32_t l,uint32_t s,uint64_t sw){return (uint64_t)((a&0x3FFFF)>>4)|(uint64_t)(l>>4)<<16|(uint64_t)(s>>4)<<32|sw<<62;}
D void fence(){asm volatile("wgmma.fence.sync.aligned;":::"memory");}
D void commit(){asm volatile("wgmma.commit_group.sync.aligned;":::"memory");}
template<int P> D void wait(){asm volatile("wgmma.wait_group.sync.aligned %0;"::"n"(P):"memory");}
D void ldm(uint32_t(&v)[4],uint32_t a){asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];":"=r"(v[0]),"=r"(v[1]),"=r"(v[2]),"=r"(v[3]):"r"(a):"memory");}
D void stm(uint32_t a,uint32_t(&v)[4]){asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};"::"r"(a),"r"(v[0]),"r"(v[1]),"r"(v[2]),"r"(v[3]):"memory");}
template<int N> struct W;
''']
for N in NS:
    c=N//2; acc=", ".join(f"%{i}" for i in range(c)); o=", ".join(f'"+f"(d[{i}])' for i in range(c))
    ins=f"wgmma.mma_async.sync.aligned.m64n{N}k16.f32.f16.f16 {{{acc}}}"
    a=", ".join(f"%{c+i}" for i in range(4))
    out.append(f'''template<> struct W<{N}>{{
 static D void rs(float(&d)[{c}],const uint32_t(&a)[4],uint64_t b){{asm volatile("{ins},{{{a}}},%{c+4},1,1,1,0;":{o}:"r"(a[0]),"r"(a[1]),"r"(a[2]),"r"(a[3]),"l"(b));}}
 static D void ss(float(&d)[{c}],uint64_t a,uint64_t b){{asm volatile("{ins},%{c},%{c+1},1,1,1,0,0;":{o}:"l"(a),"l"(b));}}
}};''')
out.append('''
// KIND 0: RS K products over 3 windows, one group. 1: SS likewise. 2: ldmatrix + RS each, four in flight. 3: ldmatrix alone. 4: tap-0 RS + ldm+RS, groups of 4 committed per block
template<int KIND,int N,int K> D void round_(float (&d)[3][N/2], uint32_t (&a)[4][4], uint64_t da, uint64_t db, uint32_t at){
  if constexpr(KIND==0){ fence();
    #pragma unroll
    for(int k=0;k<K;k++) W<N>::rs(d[k%3],a[k%4],db+(k%6)*64); commit(); wait<0>(); }
  if constexpr(KIND==1){ fence();
    #pragma unroll
    for(int k=0;k<K;k++) W<N>::ss(d[k%3],da+k%6,db+(k%6)*64); commit(); wait<0>(); }
  if constexpr(KIND==2){
    #pragma unroll
    for(int k=0;k<K;k++){ if(k>=4) wait<3>(); ldm(a[k%4],at+k%8*16); fence(); W<N>::rs(d[k%3],a[k%4],db+(k%6)*64); commit(); } wait<0>(); }
  if constexpr(KIND==3){
    #pragma unroll
    for(int k=0;k<K;k++) ldm(a[k%4],at+k%8*16);
  }
  if constexpr(KIND==4){ 
    #pragma unroll
    for(int k=0;k<K;k++) stm(at+k%8*16,a[k%4]); }
  if constexpr(KIND==5){ // blocks of 3 ldm then 3 products, a group each, one block ahead
    #pragma unroll
    for(int b=0;b<K/3;b++){ uint32_t x[3][4];
      #pragma unroll
      for(int i=0;i<3;i++) ldm(x[i],at+(b%8)*1152+i*16);
      fence();
      #pragma unroll
      for(int i=0;i<3;i++) W<N>::rs(d[b%3],x[i],db+i*64);
      commit(); wait<1>(); }
    wait<0>(); }
}
template<int KIND,int N,int K> D void role(long long*out,int wg,int t,int rounds,float*sink,uint32_t s,uint64_t db){
  uint32_t a[4][4]; float d[3][N/2];
  for(int i=0;i<4;i++) for(int j=0;j<4;j++) a[i][j]=((uint32_t*)sink)[4+t+i*4+j];
  for(int w=0;w<3;w++) for(int i=0;i<N/2;i++) d[w][i]=0;
  uint32_t base=s+wg*32768; uint64_t da=op(base+1024,1152,128,0);
  uint32_t at=base+1024+(t/32*16+t%16)*16+(t%32)/16*1152;
  long long t0=clock64();
  #pragma unroll 1
  for(int r=0;r<rounds;r++) round_<KIND,N,K>(d,a,da,db,at);
  long long t1=clock64();
  if(t==0) out[wg]=t1-t0;
  float z=0; for(int w=0;w<3;w++) for(int i=0;i<N/2;i++) z+=d[w][i];
  for(int i=0;i<4;i++) for(int j=0;j<4;j++) z+=__uint_as_float(a[i][j]);
  if(z==12345) *sink=z;
}
template<int KIND,int N,int K,int BK,int BN> __global__ void __launch_bounds__(384,1) run(long long*out,int rounds,float*sink,int beside){
  int wg=threadIdx.x/128,t=threadIdx.x%128; uint32_t s=sm();
  for(int i=threadIdx.x;i<50000;i+=blockDim.x) asm volatile("st.shared.b32 [%0],%1;"::"r"(s+4*i),"r"(0));
  asm volatile("fence.proxy.async.shared::cta;":::"memory"); __syncthreads();
  uint64_t db=op(s+98304,512,128,0),dbb=op(s+131072,8192,1024,1);
  if(!(beside && wg==1)) role<KIND,N,K>(out,wg,t,rounds,sink,s,db);
  else role<BK,BN,8>(out,wg,t,rounds*3,sink,s,dbb);
}
template<int KIND,int N,int K,int BK,int BN> void go(const char*name,int wgs,int beside){
  static long long*o=0; static float*sk; if(!o){cudaMallocManaged(&o,64);cudaMalloc(&sk,65536);cudaMemset(sk,0,65536);}
  auto k=run<KIND,N,K,BK,BN>; cudaFuncSetAttribute(k,cudaFuncAttributeMaxDynamicSharedMemorySize,220*1024);
  for(int i=0;i<3;i++) k<<<1,128*wgs,220*1024>>>(o,200,sk,beside);
  cudaError_t e=cudaDeviceSynchronize(); if(e){printf("%s failed %s\\n",name,cudaGetErrorString(e));exit(1);}
  int mine=beside?1:wgs;
  printf("%-40s wg=%d beside=%d : %.1f cycles a product-slot (SM)%s", name, wgs, beside, (double)o[0]/200/K/mine, beside?"":"\\n");
  if(beside) printf("  other: %.1f a product of 8\\n",(double)o[1]/600/8);
}
int main(){
''')
for N in [8,16,24,32,48,64]:
    for w in (1,2,3): out.append(f'  go<0,{N},24,0,8>("RS n{N}",{w},0);')
for N in [24,32]:
    for w in (1,2,3): out.append(f'  go<1,{N},24,0,8>("SS n{N}",{w},0);')
for N in [24,32]:
    for w in (1,2,3): out.append(f'  go<2,{N},24,0,8>("ldm+RS n{N}, four in flight",{w},0);')
for N in [24,32]:
    for w in (1,2,3): out.append(f'  go<5,{N},24,0,8>("3 ldm + 3 RS n{N}, a block ahead",{w},0);')
for w in (1,2,3): out.append(f'  go<3,8,24,0,8>("ldmatrix",{w},0);'); out.append(f'  go<4,8,24,0,8>("stmatrix",{w},0);')
out.append('  go<2,24,24,0,64>("ldm+RS n24 beside RS n64",2,1);')
out.append('  go<5,24,24,0,64>("3ldm+3RS n24 beside RS n64",2,1);')
out.append('  go<0,24,24,0,64>("RS n24 beside RS n64",2,1);')
out.append('  go<0,32,24,0,64>("RS n32 beside RS n64",2,1);')
out.append('  go<1,32,24,0,64>("SS n32 beside RS n64",2,1);')
out.append('  go<1,32,24,4,8>("SS n32 beside stmatrix",2,1);')
out.append('  go<2,24,24,4,8>("ldm+RS n24 beside stmatrix",2,1);')
out.append('  go<5,24,24,4,8>("3ldm+3RS n24 beside stmatrix",2,1);')
out.append('}')
open('instr.cu','w').write("\n".join(out))
