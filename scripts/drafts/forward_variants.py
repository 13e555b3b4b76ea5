"""Times variants of the forward in one process: base package mta_base, draft mta_kernels."""
import sys, time, torch, json, statistics
import importlib
sys.path[:0]=['.scratch/base','.scratch/h2','.scratch/p2']
from mta_base.conv_attention import conv_attention_reference
from torch.nn.attention import sdpa_kernel, SDPBackend
plan=json.load(open(sys.argv[1])); OUT=sys.argv[2]; LIMIT=float(sys.argv[3])
t_start=time.time()
OVER={}; WG=[None]
def patched(mod):
    m=importlib.import_module(mod+'.conv_attention.hopper.forward'); own=m.Geometry.constants; ow=m.Geometry.warpgroups
    m.Geometry.constants=lambda self:{**own(self),**OVER}
    m.Geometry.warpgroups=property(lambda self: WG[0] or ow.fget(self))
    return m
mods={n:patched('mta_'+n) for n in plan['modules']}
dev='cuda'; torch.manual_seed(0)
def inputs(B,H,N,D,cq=6,ck=11):
    q,k,v=(torch.randn(B,H,N,D,device=dev,dtype=torch.bfloat16) for _ in range(3))
    return q,k,v,torch.randn(H,cq,ck,device=dev,dtype=torch.bfloat16)/(cq*ck)**.5
def build(mod,over,x):
    OVER.clear(); OVER.update(over); WG[0]=OVER.pop('wg',None)
    mod._launches.clear(); mod.kernel.cache_clear()
    pad=(x[3].shape[2]-1)//2
    l=mod.Launches(*x,True,x[0].shape[3]**-.5,pad,False)
    l(*x); torch.cuda.synchronize()
    return l
flush=torch.empty(256<<20,dtype=torch.uint8,device=dev)
rows=[]
for D in plan['head_dims']:
    variants=[('base',mods['base'],{})]+[(n,mods[m],o) for n,m,o in plan['variants'][str(D)]]
    good=[]
    for name,mod,over in variants:
        try:
            errs=[]
            for n in (1,70,1111):
                x=inputs(1,2,n,D); l=build(mod,over,x)
                out=l(*x)[0]
                want=conv_attention_reference(*(t.double() for t in x),causal=True)
                errs.append(((out.double()-want).norm()/want.norm()).item())
            ok=max(errs)<0.006
            print(D,name,['%.4f'%e for e in errs],'ok' if ok else 'WRONG',flush=True)
            if ok: good.append((name,mod,over))
        except Exception as e: print(D,name,'failed',repr(e)[:200],flush=True)
    for B,N in ((4,4096),(1,16384)):
        x=inputs(B,16,N,D)
        fns={'cudnn':None}; ref=None
        for name,mod,over in good:
            l=build(mod,over,x); o=l(*x)[0]
            if ref is None: ref=o.float()
            else:
                e=((o.float()-ref).norm()/ref.norm()).item()
                if not e<0.006: print('WRONG at size',D,N,name,e); continue
            fns[name]=(lambda l=l:l.out_alone(*x))
        q,k,v,_=x
        def cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): torch.nn.functional.scaled_dot_product_attention(q,k,v,is_causal=True)
        fns['cudnn']=cudnn
        times={n:[] for n in fns}
        names=list(fns)
        for r in range(plan.get('rounds',7)):
            order=names[r%len(names):]+names[:r%len(names)]
            for n in order:
                fns[n]()
                for c in range(plan.get('calls',3)):
                    flush.zero_()
                    a,b=torch.cuda.Event(True),torch.cuda.Event(True)
                    a.record(); fns[n](); b.record()
                    times[n].append((a,b))
            torch.cuda.synchronize()
            if time.time()-t_start>LIMIT: break
        med={n:statistics.median(a.elapsed_time(b) for a,b in t) for n,t in times.items()}
        print(f'--- D={D} N={N} B={B}: cudnn {med["cudnn"]:.4f} ms')
        for n in names:
            print(f'   {n:28s} {med[n]:.4f} ms  x cudnn {med[n]/med["cudnn"]:.3f}  x base {med[n]/med["base"]:.3f}',flush=True)
            rows.append((D,N,n,med[n],med[n]/med['cudnn'],med[n]/med['base']))
        del fns,x,ref; 
with open(OUT,'w') as f:
    f.write('head_dim,seq,variant,ms,over_cudnn,over_base\n'+''.join(','.join(map(str,r))+'\n' for r in rows))
