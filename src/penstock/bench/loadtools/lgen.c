// lgen: one-thread epoll load generator for OpenAI-style endpoints; understands SSE and the timestamps of fakeup.
//   cc -O2 -o lgen lgen.c -lm
//   closed loop : lgen -p 8080 -c 64 -t 10
//   open loop   : lgen -p 8080 -R 100 -c 64 -t 10            (c = most connections)
//   streaming   : lgen -p 8080 -c 200 -t 10 -s -n 64 -g 10
// other: -w warm seconds (1), -a API key, -m model, -b body bytes (1000), -H 'Header: v' (repeatable), -r ramp ms, -G prefix groups (8), -P path
// One JSON line on stdout. Latencies in microseconds.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <stdint.h>
#include <errno.h>
#include <unistd.h>
#include <time.h>
#include <signal.h>
#include <math.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/resource.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <arpa/inet.h>

typedef struct { float*v; size_t n,c; } vec;
static void push(vec*a,double x){ if(a->n==a->c){a->c=a->c?a->c*2:65536;a->v=realloc(a->v,a->c*sizeof(float));} a->v[a->n++]=x; }
static int cmp(const void*a,const void*b){ float x=*(float*)a,y=*(float*)b; return x<y?-1:x>y; }
static double pct(vec*a,double p){ if(!a->n)return -1; size_t i=(size_t)ceil(p/100*a->n); if(i)i--; return a->v[i]; }
static void pv(const char*k,vec*a){ qsort(a->v,a->n,sizeof(float),cmp); double s=0; for(size_t i=0;i<a->n;i++)s+=a->v[i];
  printf(",\"%s\":{\"n\":%zu,\"mean\":%.1f,\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"p999\":%.1f,\"max\":%.1f}",k,a->n,a->n?s/a->n:-1,pct(a,50),pct(a,90),pct(a,99),pct(a,99.9),pct(a,100)); }

enum { IDLE, CONNECTING, SENDING, HDR, BCL, BEOF, CSIZE, CDATA, CCRLF, CTRAIL };
typedef struct { int fd,st,keep,status,first,done,nch; uint64_t t0,tlast; char h[16384]; int hl; int64_t left; char line[8192]; int ll; char cs[32]; int csl; char*ob; size_t ol,oo; int infree,busy; } conn;

static int ep,port=8080,C=64,stream=0,N=64,gap=0,bodyb=1000,groups=8,ramp=0; static double rate=0,T=10,W=1; static const char*key=0,*model="fake-model",*path="/v1/chat/completions"; static char hdrs[4096];
static uint64_t t_start,t_rec,t_end,seq; static int issuing=1,inflight;
static uint64_t n_all,n_rec,n_err,n_conn,ch_all,ch_rec,n_short,rd_all,rd_rec,bytes_rec,n_late; static int errst[1000]; static char errsample[400];
static vec lat,ttft,gapv,fwd,slate;
static conn*cs; static int*freel,nfree; 
static uint64_t now_ns(void){ struct timespec t; clock_gettime(CLOCK_MONOTONIC,&t); return t.tv_sec*1000000000ull+t.tv_nsec; }
static char*tmpl; static size_t tl; static size_t o_grp,o_id;
static void mk(void){
  char*b=malloc(bodyb+4096); int n=0;
  n+=sprintf(b+n,"{\"model\":\"%s\",\"messages\":[{\"role\":\"system\",\"content\":\"Tenant ",model); size_t g=n; n+=sprintf(b+n,"0000. ");
  const char*w="You are a careful assistant that answers with short and plain sentences and never invents facts. "; int wl=strlen(w),k=0; int want=bodyb-330; 
  while(k<want){ int q=want-k<wl?want-k:wl; memcpy(b+n,w,q); n+=q;k+=q; }
  n+=sprintf(b+n,"\"},{\"role\":\"user\",\"content\":\"Question "); size_t id=n; n+=sprintf(b+n,"0000000000000000 [[n=%d gap=%d]]: what is the cost of a hop, and why does it grow with the load?\"}],\"max_tokens\":%d,\"temperature\":0%s}",stream?N:0,gap,N,stream?",\"stream\":true":"");
  tmpl=malloc(n+8192); tl=sprintf(tmpl,"POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\nAccept: */*\r\nUser-Agent: lgen\r\n%s%s%s%sContent-Length: %d\r\n\r\n",path,port,key?"Authorization: Bearer ":"",key?key:"",key?"\r\n":"",hdrs,n);
  memcpy(tmpl+tl,b,n); o_grp=tl+g; o_id=tl+id; tl+=n; free(b);
}
static void mod(conn*c,int ev){ struct epoll_event e={.events=ev,.data.ptr=c}; epoll_ctl(ep,EPOLL_CTL_MOD,c->fd,&e); }
static void setfree(conn*c){ c->busy=0; if(!c->infree){c->infree=1;freel[nfree++]=c-cs;} }
static void dosend(conn*c);
static void dial(conn*c){
  c->fd=socket(AF_INET,SOCK_STREAM|SOCK_NONBLOCK,0); int o=1; setsockopt(c->fd,IPPROTO_TCP,TCP_NODELAY,&o,sizeof o);
  struct sockaddr_in a={.sin_family=AF_INET,.sin_port=htons(port),.sin_addr.s_addr=htonl(INADDR_LOOPBACK)};
  connect(c->fd,(void*)&a,sizeof a); n_conn++; c->st=CONNECTING; struct epoll_event e={.events=EPOLLIN|EPOLLOUT,.data.ptr=c}; epoll_ctl(ep,EPOLL_CTL_ADD,c->fd,&e);
}
static void start(conn*c,uint64_t t0){
  memcpy(c->ob,tmpl,tl); char x[24]; unsigned g=seq%groups; for(int d=3,q=g;d>=0;d--,q/=10) c->ob[o_grp+d]='0'+q%10; sprintf(x,"%016lx",(unsigned long)((seq*0x9E3779B97F4A7C15ull))); memcpy(c->ob+o_id,x,16); seq++;
  c->ol=tl;c->oo=0; c->t0=t0; c->first=1; c->done=0; c->nch=0; c->hl=0; c->ll=0; c->csl=0; c->busy=1; inflight++;
  if(c->fd<0) dial(c); else dosend(c);
}
static void fail(conn*c,int code){ // connection-level failure
  if(c->busy){ n_err++; errst[code]++; inflight--; }
  if(c->fd>=0){ close(c->fd); c->fd=-1; } c->st=IDLE; setfree(c);
}
static void dosend(conn*c){
  c->st=SENDING; if(c->oo==0&&c->t0==0) c->t0=now_ns();
  while(c->oo<c->ol){ ssize_t w=send(c->fd,c->ob+c->oo,c->ol-c->oo,MSG_NOSIGNAL); if(w<0){ if(errno==EAGAIN){mod(c,EPOLLIN|EPOLLOUT);return;} fail(c,1); return;} c->oo+=w; }
  c->st=HDR;
}
static void finish(conn*c,uint64_t now){
  n_all++; inflight--; int ok=c->status==200&&(!stream||c->nch==N);
  if(c->status!=200){ n_err++; errst[c->status<1000?c->status:2]++; if(!errsample[0]&&c->ll){ int k=c->ll<390?c->ll:390; memcpy(errsample,c->line,k); for(int i=0;i<k;i++) if(errsample[i]<32||errsample[i]=='"'||errsample[i]=='\\')errsample[i]='.'; } }
  else if(stream&&(c->nch!=N||!c->done)){ n_short++; }
  if(ok&&c->t0>=t_rec&&now<=t_end){ n_rec++; push(&lat,(now-c->t0)/1e3); }
  if(!c->keep){ close(c->fd); c->fd=-1; c->st=IDLE; } else c->st=IDLE;
  setfree(c);
}
static void line(conn*c,uint64_t now){
  if(c->ll<5||memcmp(c->line,"data:",5)) return;
  if(memmem(c->line,c->ll,"[DONE]",6)){ c->done=1; return; }
  char*p=memchr(c->line,'@',c->ll); if(!p||c->line+c->ll-p<20) return;
  uint64_t ts=0; for(int i=1;i<20;i++){ if(p[i]<'0'||p[i]>'9')return; ts=ts*10+(p[i]-'0'); }
  c->nch++; ch_all++; int rec=now>=t_rec&&now<=t_end; if(rec){ ch_rec++; push(&fwd,(now-ts)/1e3); }
  if(c->first){ c->first=0; if(c->t0>=t_rec&&now<=t_end) push(&ttft,(now-c->t0)/1e3); } else if(rec) push(&gapv,(now-c->tlast)/1e3);
  c->tlast=now;
}
static void body(conn*c,const char*p,size_t n,uint64_t now){
  if(!stream||c->status!=200){ if(c->status!=200){ int k=sizeof c->line-c->ll-1; if((size_t)k>n)k=n; memcpy(c->line+c->ll,p,k); c->ll+=k; } return; }
  const char*e=p+n; while(p<e){ const char*q=memchr(p,'\n',e-p); size_t k=(q?q:e)-p; if(c->ll+k<sizeof c->line){memcpy(c->line+c->ll,p,k);c->ll+=k;} if(!q)break; line(c,now); c->ll=0; p=q+1; }
}
static void feed(conn*c,char*p,size_t n,uint64_t now){
  char*e=p+n;
  while(p<e) switch(c->st){
    case HDR: { int k=e-p; if(c->hl+k>=(int)sizeof c->h)k=sizeof c->h-1-c->hl; int from=c->hl>3?c->hl-3:0; memcpy(c->h+c->hl,p,k); c->hl+=k; c->h[c->hl]=0;
      char*x=memmem(c->h+from,c->hl-from,"\r\n\r\n",4); if(!x){p+=k; if(c->hl>=(int)sizeof c->h-1){fail(c,3);return;} break;}
      p+=k-(c->hl-(x+4-c->h)); x[2]=0; c->status=atoi(c->h+9); if(c->status==100){c->hl=0;break;}
      c->keep=strncmp(c->h,"HTTP/1.0",8)!=0; char*co=strcasestr(c->h,"\r\nconnection:"); if(co){co+=13;while(*co==' ')co++; if(!strncasecmp(co,"close",5))c->keep=0;}
      char*te=strcasestr(c->h,"\r\ntransfer-encoding: chunked"); char*cl=strcasestr(c->h,"\r\ncontent-length:");
      if(te){c->st=CSIZE;c->csl=0;} else if(cl){c->left=atoll(cl+17); c->st=BCL; if(!c->left){finish(c,now);return;}} else {c->st=BEOF;c->keep=0;} break; }
    case BCL: { size_t k=e-p; if((int64_t)k>c->left)k=c->left; body(c,p,k,now); p+=k; c->left-=k; if(!c->left){finish(c,now);return;} break; }
    case BEOF: body(c,p,e-p,now); p=e; break;
    case CSIZE: { char ch=*p++; if(ch=='\n'){ c->cs[c->csl]=0; c->left=strtoll(c->cs,0,16); c->csl=0; c->st=c->left?CDATA:CTRAIL; } else if(c->csl<30) c->cs[c->csl++]=ch; break; }
    case CDATA: { size_t k=e-p; if((int64_t)k>c->left)k=c->left; body(c,p,k,now); p+=k; c->left-=k; if(!c->left)c->st=CCRLF; break; }
    case CCRLF: if(*p++=='\n') c->st=CSIZE; break;
    case CTRAIL: { char ch=*p++; if(ch=='\n'){ if(c->csl==0){finish(c,now);return;} c->csl=0; } else if(ch!='\r') c->csl++; break; }
    default: return;
  }
}
int main(int ac,char**av){
  int o; while((o=getopt(ac,av,"p:c:t:w:sn:g:R:a:m:b:H:r:G:P:"))>0) switch(o){ case'p':port=atoi(optarg);break;case'c':C=atoi(optarg);break;case't':T=atof(optarg);break;case'w':W=atof(optarg);break;case's':stream=1;break;case'n':N=atoi(optarg);break;case'g':gap=atoi(optarg);break;case'R':rate=atof(optarg);break;case'a':key=optarg;break;case'm':model=optarg;break;case'b':bodyb=atoi(optarg);break;case'H':strcat(hdrs,optarg);strcat(hdrs,"\r\n");break;case'r':ramp=atoi(optarg);break;case'G':groups=atoi(optarg);break;case'P':path=optarg;break;default:return 2;}
  signal(SIGPIPE,SIG_IGN); mk(); ep=epoll_create1(0); cs=calloc(C,sizeof*cs); freel=calloc(C,sizeof(int)); 
  struct timespec sd; clock_gettime(CLOCK_REALTIME,&sd); seq=(sd.tv_nsec/1000)*1000003ull; seq-=seq%groups;
  for(int i=C-1;i>=0;i--){ cs[i].fd=-1; cs[i].ob=malloc(tl+16); cs[i].st=IDLE; cs[i].infree=1; freel[nfree++]=i; }
  t_start=now_ns(); t_rec=t_start+(uint64_t)(W*1e9); t_end=t_rec+(uint64_t)(T*1e9); uint64_t hard=t_end+5000000000ull; uint64_t k=0; static char buf[262144]; struct epoll_event ev[512]; int launched=0;
  for(;;){
    uint64_t n=now_ns(); if(n>=t_end) issuing=0; if(!issuing&&(inflight==0||n>hard)) break;
    struct timespec ts; uint64_t next=issuing?t_end:hard;
    if(issuing){
      if(rate>0){ for(;;){ uint64_t due=t_start+(uint64_t)(k*1e9/rate); if(due>n){ if(due<next)next=due; break;} if(!nfree){ n_late++; break;}
            conn*c=&cs[freel[--nfree]]; c->infree=0; uint64_t late=n-due; k++; if(n>=t_rec) push(&slate,late/1e3); start(c, late>1000000?due:0); n=now_ns(); } }
      else while(nfree){ if(ramp&&launched<C){ uint64_t due=t_start+(uint64_t)launched*ramp*1000000ull/C; if(due>n){ if(due<next)next=due; break;} launched++; }
            conn*c=&cs[freel[--nfree]]; c->infree=0; start(c,0); }
    }
    n=now_ns(); uint64_t d=next>n?next-n:0; if(issuing&&rate<=0&&nfree&&!ramp) d=0; ts.tv_sec=d/1000000000;ts.tv_nsec=d%1000000000;
    int m=epoll_pwait2(ep,ev,512,&ts,0);
    for(int i=0;i<m;i++){ conn*c=ev[i].data.ptr; if(c->fd<0)continue;
      if(c->st==CONNECTING){ if(ev[i].events&(EPOLLERR|EPOLLHUP)){ fail(c,4); usleep(1000); continue;} if(ev[i].events&EPOLLOUT){ mod(c,EPOLLIN); dosend(c);} continue; }
      if(c->st==SENDING&&ev[i].events&EPOLLOUT){ mod(c,EPOLLIN); dosend(c); if(c->fd<0)continue; }
      if(ev[i].events&(EPOLLIN|EPOLLHUP|EPOLLERR)){ ssize_t r=recv(c->fd,buf,sizeof buf,0); uint64_t t=now_ns();
        if(r>0){ rd_all++; if(t>=t_rec&&t<=t_end){rd_rec++;bytes_rec+=r;} feed(c,buf,r,t); }
        else if(r==0||errno!=EAGAIN){ if(c->st==BEOF){ finish(c,t); } else if(c->st==IDLE){ close(c->fd); c->fd=-1; } else fail(c,5); } }
    }
  }
  struct rusage ru; getrusage(RUSAGE_SELF,&ru); double cpu=ru.ru_utime.tv_sec+ru.ru_utime.tv_usec/1e6+ru.ru_stime.tv_sec+ru.ru_stime.tv_usec/1e6;
  printf("{\"port\":%d,\"conc\":%d,\"rate\":%g,\"stream\":%d,\"n\":%d,\"gap\":%d,\"body\":%d,\"secs\":%g,\"wall\":%.3f,\"req_all\":%lu,\"req\":%lu,\"rps\":%.1f,\"err\":%lu,\"short\":%lu,\"unfinished\":%d,\"connects\":%lu,\"late\":%lu,\"chunks_all\":%lu,\"chunks\":%lu,\"chunks_s\":%.1f,\"reads\":%lu,\"mb_s\":%.2f,\"lgen_cpu\":%.3f",
    port,C,rate,stream,N,gap,bodyb,T,(now_ns()-t_start)/1e9,n_all,n_rec,n_rec/T,n_err,n_short,inflight,n_conn,n_late,ch_all,ch_rec,ch_rec/T,rd_rec,bytes_rec/T/1e6,cpu);
  pv("lat",&lat); if(stream){pv("ttft",&ttft);pv("gapd",&gapv);pv("fwd",&fwd);} if(rate>0)pv("sched_late",&slate);
  printf(",\"errs\":{"); int f=1; for(int i=0;i<1000;i++) if(errst[i]){printf("%s\"%d\":%d",f?"":",",i,errst[i]);f=0;} printf("}"); if(errsample[0])printf(",\"errsample\":\"%s\"",errsample); printf("}\n"); return 0;
}
