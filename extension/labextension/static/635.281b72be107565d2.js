"use strict";(self.rspackChunkjupyter_rpcbench=self.rspackChunkjupyter_rpcbench||[]).push([[635],{2(e,t,r){r.r(t),r.d(t,{default:()=>eI});var n=r(3),s=r(4),a=r(5),o=r(6),i=r(7);let l=/^(\s*)%%remote(?![^\s])([^\n]*)(\n|$)/,c=/(?:"[^"]*"|'[^']*'|[^\s"'])+/g,d=new Set(["-i","-o","--rref","--timeout"]);function h(e){let t=[],r=[],n=!1;for(let s of e.match(c)??[])(n||s.startsWith("-")?r:t).push(s),n=!n&&d.has(s);return{targets:t,options:r}}function p(e,t){if(e?.model.type!=="code")return!1;let r=e.model.sharedModel,n=function(e,t){let r=l.exec(e);if(!r)return null===t?null:{start:0,end:0,text:`%%remote ${t}
`};let n=r[1]?.length??0;if(null===t)return{start:n,end:r[0].length,text:""};let{targets:s,options:a}=h(r[2]??""),o=r[0].length-(r[3]?.length??0);return s.join(" ")===t?null:{start:n,end:o,text:["%%remote",t,...a].join(" ")}}(r.source,t);return n&&r.updateSource(n.start,n.end,n.text),!0}function u(e){return e?.clusters.find(e=>e.current)}function b(e){return`${e} worker${1===e?"":"s"}`}let m="dashboard",g="%load_ext rpcbench",x={product:"rpcbench",workers:"Workers",sidebar:"rpcbench: workers",runsOn:"Runs on",noNotebook:"Open a notebook to start workers for it.",noKernel:"This notebook has no Python kernel.",waitsForKernel:"Waiting for the kernel…",noConnection:"The connection to the kernel is lost. The page keeps trying to reach it.",loading:`Loading rpcbench in the kernel (${g}), after any cell that runs…`,notLoaded:"rpcbench is no longer loaded in this kernel.",kernelGone:"The kernel is gone.",otherVersion:"This kernel and this page have different versions of rpcbench: install the same version for both.",loadFailed:e=>`${g} failed in this notebook's kernel: ${e}`,interrupted:"it was interrupted",start:{button:e=>e?`Start ${b(e)}`:"Start",doing:e=>`Starting ${b(e)}…`,loads:`Runs \`${g}\` in this notebook's kernel first.`,same:e=>`The same as \`%cluster start ${e}\`.`},cluster:{label:e=>`Cluster ${e}`,about:(e,t)=>[b(e),..."process"===t?[]:[t]].join(", "),current:"current",use:"use",fewer:e=>`One fewer worker for ${e}`,more:e=>`One more worker for ${e}`,stop:e=>`Stop ${e}`},worker:{drag:e=>`Drag ${e} to a cell to run the cell there`,target:e=>`Let the active cell run on ${e}`,interrupt:e=>`Interrupt ${e}`,restart:e=>`Restart ${e}`,startAgain:e=>`Start ${e} again`,lost:e=>`lost: ${e}`,started:e=>`started ${2===e?"twice":`${e} times`}`,drop:e=>`runs on ${e}`},picker:{title:"Where this cell runs: its first line, %%remote. Options on that line stay when the target changes; 'notebook' removes the line (undo brings it back).",notebook:"notebook",auto:e=>`${e} (%autoremote)`,lost:e=>`${e} (lost)`,none:"(no target yet)"},ask:{start:"Start workers",scale:"How many workers should there be?",restart:"Restart a worker",panel:"Open a panel",target:"Run this cell on",noCell:"Choose a code cell first: only code cells have a target.",restartOne:e=>`Restart ${e}?`,stillRuns:e=>`${e} is still running. Everything it holds will be lost.`,stop:e=>`Stop ${b(e)}?`,lose:"Everything its workers hold will be lost.",end:e=>`End ${e}?`,loseThem:e=>`Everything ${1===e?"it holds":"they hold"} will be lost.`,confirm:{restart:"Restart",stop:"Stop",end:"End"}},commands:{start:"Start Workers…",scale:"Change the Number of Workers…",restart:"Restart a Worker…",interrupt:"Interrupt All Workers",stop:"Stop All Workers…",dashboard:"Open the Dashboard",panel:"Open a Panel…",target:"Run This Cell on…",sidebar:"Show the Sidebar",startPage:"Start Page",notebook:"New rpcbench Notebook"},modes:{title:"On now",end:e=>`End: ${e}`,endTip:(e,t)=>`${e}. A click ends it, as ${t} does.`,magic:{chaos:"%chaos off",record:"%record stop",autoremote:"%autoremote off",held:"Release all"}},status:{title:"Show the workers in the sidebar",text:(e,t)=>`rpcbench: ${e?b(e):"no workers"}${t?`, ${t} lost`:""}`},panels:{title:"Panels",dashboard:"Dashboard",dashboardTip:"Workers, pipeline, autograd and messages as one board beside the notebook",tip:e=>`Open the panel ${e} in a tab`,tab:(e,t)=>`${e}: ${t}`,caption:(e,t)=>`The panel ${e} of ${t}`,note:"About this tab",waitsForNotebook:e=>`Waiting for ${e}…`,notebookClosed:e=>`${e} is not open.`,noKernel:e=>`${e} has no Python kernel now.`,none:e=>`No workers run in ${e}.`,stopped:"The workers are stopped. This is the last picture.",open:"Open the notebook",close:"Close this tab",picture:e=>`This is the last picture, of ${e}.`,showLive:"Show live"},startPage:{tab:"rpcbench",title:"rpcbench",about:"Distributed PyTorch in notebooks: cells on workers, RPC, distributed autograd and pipelines you can watch.",startHere:"Start here",newTitle:"New rpcbench notebook",newAbout:"An empty notebook whose first cell starts two workers.",newCaption:"A notebook whose first cell starts two workers",caption:"Lessons, and a new notebook with two workers",tracks:{start:"Start",rpc:"RPC and autograd",scale:"Training at scale",exam:"Exam",appendix:"Appendix"},minutes:e=>`${e} min`,solved:(e,t)=>e>=t?`✓ all ${t} exercises solved`:`${e} of ${t} exercises solved`,noLessons:"There are no lessons in this folder. “rpcbench lessons”, in a terminal, copies them to a new one.",waits:"Looking for lessons…"}},f=[`${g}
%cluster start 2`,""],_=x.ask,w=x.picker.notebook;class v{constructor(e,t){this._sessions=e,this._tabs=t}async start(e){let t=e??await this._askNumber(_.start,2);t&&await this._sessions.current?.perform({do:"start",size:t},x.start.doing(t))}async scale(e=this._cluster,t){let r=e&&(t??await this._askNumber(_.scale,e.workers.length));e&&r&&await this._mayShrink(e,r)&&await this._act(e,"scale",String(r))}async restart(e=this._cluster,t){let r=t??(e&&await this._askWorker(e,_.restart));if(!e||!r)return;let{name:n,state:s}=r;("lost"===s||await k(_.restartOne(n),_.stillRuns(n),_.confirm.restart))&&await this._act(e,"restart",n)}async interrupt(e=this._cluster,t="all"){e&&await this._act(e,"interrupt",t)}async stop(e=this._cluster){e&&await k(_.stop(e.workers.length),_.lose,_.confirm.stop)&&await this._act(e,"stop","all")}async use(e){await this._sessions.current?.perform({do:"use",of:e.name})}async openPanel(e){let{current:t,notebook:r}=this._sessions,n=e??await y(_.panel,[m,...t?.state?.panels??[]]);r&&n&&this._tabs.open(r,n)}async setTarget(e){let{current:t,notebook:r}=this._sessions,n=this._cluster?.workers.map(e=>e.name)??[],s=e??await y(_.target,[w,...n,"all"]);s&&!p(r?.content.activeCell,s===w?null:s)&&t?.notify(_.noCell,!0)}async _act(e,t,r){await this._sessions.current?.perform({do:"act",of:e.name,action:t,target:r})}get _cluster(){return u(this._sessions.current?.state??null)}async _askNumber(e,t){let r=await s.InputDialog.getNumber({title:e,value:t,label:x.workers});return r.button.accept&&r.value&&r.value>=1?Math.floor(r.value):null}async _askWorker(e,t){let r=await y(t,e.workers.map(e=>e.name));return e.workers.find(e=>e.name===r)}async _mayShrink(e,t){let r=e.workers.slice(t).map(({name:e})=>e);return!r.length||k(_.end(r.join(", ")),_.loseThem(r.length),_.confirm.end)}_sessions;_tabs}async function k(e,t,r){let n=[s.Dialog.cancelButton(),s.Dialog.warnButton({label:r})];return(await (0,s.showDialog)({title:e,body:t,buttons:n})).button.accept}async function y(e,t){let r=t.length?await s.InputDialog.getItem({title:e,items:t,label:e}):null;return r?.button.accept?r.value:null}let E=x.product,C=x.commands,j="application/x-rpcbench-worker",N="rbx-over",S="";function $(e){let t=t=>{e.node.querySelectorAll(`.${N}`).forEach(e=>e!==t&&e.classList.remove(N)),t&&(t.classList.add(N),t.dataset.rbxDrop=x.worker.drop(S))},r=t=>{let r,n=t.dataTransfer?.types.includes(j)?(r=t.target,e.content.widgets.find(e=>"code"===e.model.type&&r instanceof Node&&e.node.contains(r))):void 0;return n&&(t.preventDefault(),t.stopPropagation()),n};e.node.addEventListener("dragover",e=>t(r(e)?.node),!0),e.node.addEventListener("dragleave",r=>{r.relatedTarget instanceof Node&&e.node.contains(r.relatedTarget)||t()},!0),e.node.addEventListener("drop",e=>{p(r(e),e.dataTransfer?.getData(j)||null),t()},!0)}var T=r(8),A=r(9);let I=`<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16" viewBox="0 0 24 24">
  <g class="jp-icon3" fill="#616161">
    <rect x="2" y="14" width="20" height="2.4" rx="1"/>
    <rect x="4.5" y="16" width="2.4" height="6" rx="1"/>
    <rect x="17.1" y="16" width="2.4" height="6" rx="1"/>
    <rect x="4" y="6" width="6.5" height="6.5" rx="1.4"/>
    <circle cx="16.8" cy="9.2" r="3.4"/>
  </g>
</svg>`,P=`<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">
  <path class="jp-icon3" fill="#616161" d="M19 13H5v-2h14z"/>
</svg>`,D=new A.LabIcon({name:"rpcbench:fewer",svgstr:P}),L=new A.LabIcon({name:"rpcbench:bench",svgstr:I});var W=r(10),z=r.n(W);let M="lessons.json",R="notebooks",O=x.startPage,F=Object.keys(O.tracks);class q extends A.ReactWidget{constructor(e,t,r){super(),this.id="rpcbench-start-page",this.addClass("rbx-start-page"),this.title.label=O.tab,this.title.icon=L,this.title.closable=!0,this.node.tabIndex=0,this._openNotebook=t,this._newNotebook=r,this._contents=e,this._look()}onAfterShow(){this._look()}async _look(){this._cards=await H(this._contents),this.update()}render(){let e=this._cards;return z().createElement("div",{className:"rbx-page"},z().createElement("header",null,z().createElement(L.react,{tag:"span"}),z().createElement("div",null,z().createElement("h1",null,O.title),z().createElement("p",null,O.about)),z().createElement("button",{className:"rbx-button rbx-new",title:O.newAbout,onClick:this._newNotebook},z().createElement("b",null,O.newTitle),z().createElement("span",null,O.newAbout))),!e?.length&&z().createElement("p",{className:"rbx-hint"},e?O.noLessons:O.waits),F.map(t=>this._track(t,e?.filter(e=>e.track===t)??[])))}_track(e,t){let r=O.tracks[e];return t.length?z().createElement("section",{key:e},z().createElement("h2",null,r),z().createElement("ol",{"aria-label":r},t.map((t,r)=>z().createElement("li",{key:t.path},this._card(t,"start"===e&&0===r))))):null}_card(e,t){return z().createElement("button",{className:"rbx-card",onClick:()=>this._openNotebook(e.path)},z().createElement("img",{src:e.picture,alt:"",width:"160",height:"90"}),z().createElement("span",{className:"rbx-title"},e.title),z().createElement("span",{className:"rbx-what"},e.about),z().createElement("span",{className:"rbx-minutes"},O.minutes(e.minutes),e.solved>0&&` \xb7 ${O.solved(e.solved,e.exercises)}`),t&&z().createElement("span",{className:"rbx-here"},O.startHere))}_contents;_openNotebook;_newNotebook;_cards=null}async function H(e){let t=await K(e),r=null===t?null:await U(e,`${t}${M}`),n=(r&&await U(e,`${t}progress.json`))??{},s=async r=>({...r,path:`${t}${r.lesson}.ipynb`,picture:await e.getDownloadUrl(`${t}pictures/${r.lesson}.svg`),solved:n[r.checks]?.length??0});return Promise.all((r??[]).map(s))}async function K(e){let t=await B(e,""),r=t.filter(e=>"directory"===e.type),n=e=>Number("rpcbench-course"===e.name);for(let t of(r.sort((e,t)=>n(t)-n(e)||t.last_modified.localeCompare(e.last_modified)),["",...r.slice(0,10).map(e=>`${e.path}/`)])){let r=`${t}${R}`;if(J(await B(e,t),R)&&J(await B(e,r),M))return`${r}/`}return J(t,M)?"":null}async function B(e,t){let r=await e.get(t,{type:"directory",content:!0}).catch(()=>null);return r?.content??[]}function J(e,t){return e.some(e=>e.name===t)}async function U(e,t){let r=await e.get(t,{type:"file",format:"text",content:!0}).catch(()=>null);return r&&JSON.parse(String(r.content))}let G="rpcbench:start-page",V="rpcbench:new-notebook",X="rpcbenchStart",Z=x.product;async function Q({contents:e,kernelspecs:t},r){let{path:n}=await e.newUntitled({path:r,type:"notebook"});await t.ready;let s=t.specs,a=[s?.default??"",...Object.keys(s?.kernelspecs??{})].find(e=>s?.kernelspecs[e]?.language==="python"),o={metadata:a?{kernelspec:{name:a,display_name:s?.kernelspecs[a]?.display_name??a}}:{},nbformat:4,nbformat_minor:5,cells:f.map((e,t)=>({id:`cell-${t+1}`,cell_type:"code",source:e,metadata:{},outputs:[],execution_count:null}))};return await e.save(n,{type:"notebook",format:"json",content:o}),n}var Y=r(11);class ee extends Y.Widget{constructor(e,t){super({node:document.createElement("div")}),this.addClass("rbx-picker"),this._cell=e,this._sessions=t,this._select.title=x.picker.title,this._select.setAttribute("aria-label",x.runsOn),this._select.dataset.lmSuppressShortcuts="true",this._select.addEventListener("change",()=>p(e,this._select.value||null)),this.addClass("jp-HTMLSelect"),this.addClass("jp-DefaultStyle"),this.node.append(this._select,A.caretDownEmptyIcon.element({tag:"span",stylesheet:"select",right:"7px",top:"5px"})),e.model.contentChanged.connect(this._draw,this),this._draw()}dispose(){this.isDisposed||(this._session?.changed.disconnect(this._draw,this),this._cell.model?.contentChanged.disconnect(this._draw,this),super.dispose())}onAfterAttach(){requestIdleCallback(()=>requestIdleCallback(()=>this.addClass("rbx-settled")))}_draw(){var e;let t;if(this.isDisposed||this._cell.isDisposed)return;this._updateSession();let r=(e=this._cell.model.sharedModel.source,(t=l.exec(e))?h(t[2]??"").targets.join(" "):null),n=this._options(r),s=JSON.stringify(n);s!==this._drawn&&(this._drawn=s,this._select.replaceChildren(...n.map(([e,t])=>new Option(t,e)))),this._select.value=r??"",this.setHidden(null===r&&this._session?.phase!=="loaded")}_options(e){let t=x.picker,r=this._session?.state?.auto,n=u(this._session?.state??null)?.workers??[],s=[["",r?t.auto(r):t.notebook],...n.map(({name:e,state:r})=>[e,"lost"===r?t.lost(e):e])];return n.length>1&&s.push(["all","all"]),null===e||s.some(([t])=>t===e)||s.push([e,e||t.none]),s}_updateSession(){let e=this._sessions.forCell(this._cell);e!==this._session&&(this._session?.changed.disconnect(this._draw,this),e?.changed.connect(this._draw,this),this._session=e)}_cell;_sessions;_select=document.createElement("select");_session=null;_drawn=""}var et=r(12);let er=["restarting","autorestarting","terminating","dead"],en=new Set;window.addEventListener("pagehide",()=>en.forEach(e=>e.close()));class es{constructor(e,t){this._kernel=e,this._handlers=t,this._comm=e.createComm("rpcbench"),this._comm.onMsg=e=>t.onMessage?.(e.content.data),this._comm.onClose=e=>this._end(e.content.data),e.statusChanged.connect(this._onStatus,this)}get id(){return this._comm.commId}async open(e){await this._kernel.info,this._kernel.supportsSubshells&&"subshellStarted"in this._comm&&await this._comm.subshellStarted,!this._isClosed&&(this._comm.open(e),this._handlers.isPanel&&en.add(this))}close(){this._detach(),this._comm.isDisposed||this._kernel.isDisposed||this._comm.close()}_onStatus(e,t){er.includes(t)&&this._end({error:x.kernelGone,gone:!0})}_end(e){this._isClosed||(this._detach(),this._handlers.onEnd(e))}_detach(){this._isClosed=!0,en.delete(this),this._kernel.statusChanged.disconnect(this._onStatus,this)}_kernel;_handlers;_comm;_isClosed=!1}async function ea(e,t){return new Promise((r,n)=>{new es(e,{onEnd:e=>r(e)}).open({...t}).catch(n)})}class eo{constructor(e){this._context=e,e.kernelChanged.connect(this._onKernelChanged,this),e.statusChanged.connect(this._onStatus,this),e.connectionStatusChanged.connect(this._onConnection,this),this._renewalTimer=window.setInterval(()=>void this._renew(),3e4),this._onKernelChanged()}changed=new et.Signal(this);get phase(){return this._phase}get state(){return this._state}get doing(){let e=this._state?.doing??[];return e.length||!this._asked?e:[this._asked]}get notice(){return this._notice}get kernel(){return this._context.session?.kernel??null}get isDisposed(){return this._isDisposed}dispose(){this._isDisposed=!0,window.clearInterval(this._renewalTimer),window.clearTimeout(this._noticeTimer),this._closeWatch(),et.Signal.clearData(this)}notify(e,t=!1){window.clearTimeout(this._noticeTimer),this._notice=e?{text:e,isError:t}:null,this._noticedAt=Date.now(),e&&!t&&(this._noticeTimer=window.setTimeout(()=>this.notify(""),12e3)),this.changed.emit()}async perform(e,t=""){this._asked=t,this.notify("");try{("absent"!==this._phase||await this._load())&&await this._request(e)}finally{this._asked="",this.changed.emit()}}async _request(e){let{kernel:t}=this;if(t){let r=await ea(t,e).catch(e=>({error:String(e)}));t===this.kernel&&["loaded","absent"].includes(this._phase)&&this.notify(r.error??r.text??x.notLoaded,!r.text)}}recheck(){"absent"===this._phase&&this._detect()}_onKernelChanged(){this._forget(this.kernel?"unknown":"none"),this._detect()}_onConnection(e,t){"connected"===t&&"unconnected"===this._phase?this._onKernelChanged():"connected"===t||["none","unknown"].includes(this._phase)||this._forget("unconnected")}_onStatus(e,t){"restarting"===t||"autorestarting"===t?this._forget("unknown"):"dead"===t?this._forget("none"):"unknown"!==this._phase||this._isDetecting||this._detect()}async _detect(){this._isDetecting=!0,await this._askWhetherLoaded().finally(()=>this._isDetecting=!1)}async _askWhetherLoaded(){let{kernel:e}=this,t=this._generation;if(!e||"python"!==(await e.info).language_info.name)return this._setPhase("none",t);let r=await e.requestExecute({code:"",silent:!0,store_history:!1,user_expressions:{here:"'rpcbench' in get_ipython().extension_manager.loaded"}}).done.catch(()=>null);if(!r||t!==this._generation||"loaded"===this._phase)return;let n=r.content,s="ok"===n.status&&JSON.stringify(n.user_expressions).includes('"True"');await (s?this._watch():this._setPhase("absent",t))}async _load(){let{kernel:e}=this,t=this._generation;this._setPhase("loading");let r=await e?.requestExecute({code:"%load_ext rpcbench",silent:!0,store_history:!1}).done;if(t!==this._generation||!r)return!1;if("ok"!==r.content.status){let e="error"===r.content.status?r.content.evalue:x.interrupted;return this._setPhase("absent"),this.notify(x.loadFailed(e),!0),!1}return await this._watch(),!0}async _watch(){let{kernel:e}=this;if(!e)return;this._closeWatch();let t=this._generation;this._comm=new es(e,{onMessage:e=>this._onState(e),onEnd:()=>{this._closeWatch(),this._setPhase("absent")}}),this._setPhase("loaded",t),await this._comm.open({do:"watch"})}_onState(e){if(void 0!==e.problem)this.notify(e.problem,!0);else if(3===e.speaks){let t=e=>e?.clusters.map(({number:e})=>e).join(" "),r=null!==this._state&&t(e)!==t(this._state);this._state=e,r&&Date.now()-this._noticedAt>2e3&&(this._notice=null),this.changed.emit()}else this.notify(x.otherVersion,!0)}async _renew(){let{kernel:e,_comm:t}=this;e&&t&&!1===(await ea(e,{do:"stay",watch:t.id})).there&&t===this._comm&&await this._watch()}_closeWatch(){this._generation+=1,this._comm?.close(),this._comm=null,this._state=null}_forget(e){this._closeWatch(),this._notice=null,this._asked="",this._setPhase(e)}_setPhase(e,t=this._generation){t!==this._generation||this._isDisposed||(this._phase=e,this.changed.emit())}_context;_renewalTimer;_noticeTimer=0;_noticedAt=0;_phase="none";_state=null;_notice=null;_asked="";_comm=null;_generation=0;_isDetecting=!1;_isDisposed=!1}class ei{constructor(e){this._tracker=e,e.currentChanged.connect(this._onCurrent,this),o.NotebookActions.executed.connect((t,{notebook:r,cell:n})=>{let s=e.find(e=>e.content===r);s&&n.model.sharedModel.source.includes("rpcbench")&&this.forPanel(s).recheck()}),this._onCurrent()}changed=new et.Signal(this);get opened(){return this._tracker.widgetAdded}find(e){return this._tracker.find(t=>t.context.path===e)}get notebook(){return this._tracker.currentWidget}get current(){return this.notebook&&this.forPanel(this.notebook)}forPanel(e){let t=this._known.get(e);if(t)return t;let r=new eo(e.sessionContext);return this._known.set(e,r),r.changed.connect(()=>r===this.current&&this.changed.emit()),e.disposed.connect(()=>r.dispose()),r}forCell(e){let t=this._tracker.find(t=>t.content.widgets.includes(e));return t?this.forPanel(t):null}_onCurrent(){this.changed.emit()}_tracker;_known=new WeakMap}function el({icon:e,label:t,disabled:r=!1,flip:n=!1,onClick:s}){let a=`rbx-icon${n?" rbx-flip":""}`;return z().createElement("button",{className:a,title:t,"aria-label":t,"aria-disabled":r,onClick:()=>!r&&s()},z().createElement(e.react,{tag:"span",elementSize:"small"}))}function ec({worker:e,cluster:t,disabled:r,actions:n}){let{name:s,state:a}=e,o="lost"===a,i=x.worker;return z().createElement("li",{className:`rbx-worker rbx-${a}`,"data-worker":s,draggable:t.current&&!o,onDragStart:e=>{var t;return t=e.dataTransfer,void(S=s,t.setData(j,s),t.setData("text/plain",`%%remote ${s}
`),t.effectAllowed="copy")},title:t.current&&!o?i.drag(s):void 0},z().createElement(eh,{state:a}),z().createElement("div",{className:"rbx-text"},z().createElement("span",{className:"rbx-now"},z().createElement("span",{className:"rbx-name"},s)," ",z().createElement("span",{className:"rbx-about"},function({state:e,note:t,cpu:r}){return t?x.worker.lost(t):r>0?`${e} \xb7 ${r} %`:e}(e))),!o&&e.start>1&&z().createElement("span",{className:"rbx-about"},i.started(e.start))),t.current&&!o&&z().createElement(el,{icon:A.undoIcon,label:i.target(s),onClick:()=>void n.setTarget(s),flip:!0}),!o&&z().createElement(el,{icon:A.stopIcon,label:i.interrupt(s),onClick:()=>void n.interrupt(t,s)}),z().createElement(el,{icon:A.refreshIcon,label:o?i.startAgain(s):i.restart(s),disabled:r,onClick:()=>void n.restart(t,e)}))}let ed={ready:z().createElement("circle",{cx:"6",cy:"6",r:"4.5"}),busy:z().createElement("path",{d:"M2 1.5 10.5 6 2 10.5Z"}),starting:z().createElement("circle",{cx:"6",cy:"6",r:"4",className:"rbx-hollow"}),stopped:z().createElement("path",{d:"M2 1.5h3v9H2zM7 1.5h3v9H7z"}),lost:z().createElement("path",{d:"M2 2 10 10M10 2 2 10",className:"rbx-hollow"})};function eh({state:e}){return z().createElement("svg",{className:"rbx-mark",viewBox:"0 0 12 12",width:"12",height:"12","aria-hidden":"true"},ed[e])}function ep({cluster:e,several:t,disabled:r,actions:n}){let{name:s,kind:a,workers:o}=e,i=x.cluster;return z().createElement("section",{className:"rbx-cluster","aria-label":i.label(s)},z().createElement("header",null,z().createElement("div",{className:"rbx-text"},z().createElement("h3",null,s),z().createElement("span",{className:"rbx-about"},i.about(o.length,a)),t&&e.current&&z().createElement("span",{className:"rbx-about"},i.current)),t&&!e.current&&z().createElement("button",{className:"rbx-button",disabled:r,onClick:()=>void n.use(e)},i.use),z().createElement(el,{icon:D,label:i.fewer(s),disabled:r||o.length<2,onClick:()=>void n.scale(e,o.length-1)}),z().createElement(el,{icon:A.addIcon,label:i.more(s),disabled:r,onClick:()=>void n.scale(e,o.length+1)}),z().createElement(el,{icon:A.closeIcon,label:i.stop(s),disabled:r,onClick:()=>void n.stop(e)})),z().createElement("ul",null,o.map(t=>z().createElement(ec,{key:t.name,worker:t,cluster:e,disabled:r,actions:n}))))}function eu({session:e}){let t=x.modes;return z().createElement(z().Fragment,null,e?.state?.modes.map(({name:r,text:n,end:s})=>z().createElement("button",{key:`${r} ${s.of}`,className:"rbx-chip","data-mode":r,title:t.endTip(n,t.magic[r]),"aria-label":t.end(n),onClick:()=>void e.perform(s)},n,z().createElement(A.closeIcon.react,{tag:"span"}))))}function eb({text:e}){let[t,r]=(/(\d+) of (\d+)/.exec(e)??[]).slice(1).map(Number);return z().createElement("div",{className:"rbx-progress"},e,z().createElement("progress",{"aria-hidden":"true",...r?{value:t,max:r}:{}}))}function em({loads:e,disabled:t,actions:r}){let[n,s]=(0,W.useState)(2),a=Number.isInteger(n)&&n>=1;return z().createElement("form",{className:"rbx-start",onSubmit:e=>{e.preventDefault(),r.start(n)}},z().createElement("label",null,x.workers," ",z().createElement("input",{type:"number",min:1,step:1,value:Number.isNaN(n)?"":n,onChange:e=>s(e.target.valueAsNumber)})),z().createElement("button",{type:"submit",className:"rbx-button rbx-first",disabled:t||!a},x.start.button(a?n:void 0)),z().createElement("p",{className:"rbx-hint"},e&&z().createElement(eg,{text:`${x.start.loads} `}),z().createElement(eg,{text:x.start.same(a?n:2)})))}function eg({text:e}){return z().createElement(z().Fragment,null,e.split("`").map((e,t)=>t%2?z().createElement("code",{key:t},e):e))}class ex extends A.ReactWidget{constructor(e,t){super(),this.id="rpcbench-sidebar",this.addClass("rbx-sidebar"),this.title.icon=L,this.title.caption=x.sidebar,this.node.setAttribute("role","region"),this.node.setAttribute("aria-label",x.sidebar),this._sessions=e,this._actions=t,e.changed.connect(()=>this.update())}render(){let e=this._sessions.current,t=this._sessions.notebook?.title.label;return z().createElement(z().Fragment,null,z().createElement("header",{className:"rbx-head"},z().createElement("h2",null,x.workers),t&&z().createElement("span",{className:"rbx-of"},t)),e?this._body(e):z().createElement("p",{className:"rbx-hint"},x.noNotebook),z().createElement(e_,{session:e}))}_body(e){switch(e.phase){case"none":return z().createElement("p",{className:"rbx-hint"},x.noKernel);case"unknown":return z().createElement("p",{className:"rbx-hint"},x.waitsForKernel);case"unconnected":return z().createElement("p",{className:"rbx-hint"},x.noConnection);case"loading":return z().createElement("p",{className:"rbx-hint"},x.loading);case"absent":return z().createElement(em,{loads:!0,disabled:!1,actions:this._actions});case"loaded":return this._clusters(e)}}_clusters(e){let{state:t}=e;if(!t)return z().createElement("p",{className:"rbx-hint"},x.waitsForKernel);let r=e.doing.length>0,n=t.clusters.length>1;return z().createElement(z().Fragment,null,t.modes.length>0&&z().createElement("section",{className:"rbx-modes","aria-label":x.modes.title},z().createElement(eu,{session:e})),t.clusters.map(e=>z().createElement(ep,{key:e.name,cluster:e,several:n,disabled:r,actions:this._actions})),0===t.clusters.length&&z().createElement(em,{loads:!1,disabled:r,actions:this._actions}),t.clusters.length>0&&t.panels.length>0&&z().createElement(ef,{names:t.panels,actions:this._actions}))}_sessions;_actions}function ef({names:e,actions:t}){let r=x.panels,n=(e,r,n,s="")=>z().createElement("button",{key:e,className:`rbx-button ${s}`,onClick:()=>void t.openPanel(e),title:n},r);return z().createElement("section",{className:"rbx-panels","aria-label":r.title},z().createElement("h3",null,r.title),z().createElement("div",null,n(m,r.dashboard,r.dashboardTip,"rbx-first"),e.map(e=>n(e,e,r.tip(e)))))}function e_({session:e}){let t=e?.doing??[],r=e?.notice;return z().createElement("div",{className:"rbx-news"},z().createElement("div",{role:"status",className:"rbx-doing"},t.map(e=>z().createElement(eb,{key:e,text:e})),!r?.isError&&r?.text),z().createElement("div",{role:"alert",className:"rbx-bad"},r?.isError&&r.text))}class ew extends A.ReactWidget{constructor(e,t){super(),this.addClass("rbx-status"),this._sessions=e,this._activate=t,e.changed.connect(this._onChanged,this),this._onChanged()}get isShown(){return this._sessions.current?.phase==="loaded"}_onChanged(){this.update()}render(){return z().createElement(z().Fragment,null,z().createElement("button",{className:"rbx-status-button",onClick:this._activate,title:x.status.title},this._text()),z().createElement(eu,{session:this._sessions.current}))}_text(){let e=this._sessions.current,t=e?.state?.clusters.flatMap(e=>e.workers)??[],r=t.filter(e=>"lost"===e.state).length;return e?.doing[0]??x.status.text(t.length,r)}_sessions;_activate}var ev=r(13),ek=r(14);let ey=x.panels;class eE extends A.ReactWidget{constructor(e,t){super(),this.addClass("rbx-note"),this._tab=e,this._openNotebook=t}render(){let{session:e}=this._tab,t=this._text();return this.setHidden(!t),z().createElement("div",{role:"status","aria-label":ey.note},t,e?.notice?.isError&&z().createElement("span",{className:"rbx-bad"},e.notice.text),e?.doing.map(e=>z().createElement(eb,{key:e,text:e})),z().createElement("span",{className:"rbx-deeds"},t&&!e?.doing.length&&this._buttons()))}_text(){let{session:e,path:t,isDrawn:r}=this._tab;switch(e?.phase){case void 0:return this._tab.isRestored?ey.notebookClosed(t):ey.waitsForNotebook(t);case"none":return ey.noKernel(t);case"unconnected":return x.noConnection;case"loading":return x.loading;case"unknown":return x.waitsForKernel;default:if(this._mayStart)return r?ey.stopped:ey.none(t);return e?.state||r?"":x.waitsForKernel}}get _mayStart(){let{session:e}=this._tab;return e?.phase==="absent"||e?.phase==="loaded"&&e.state?.clusters.length===0}_buttons(){let{session:e,path:t}=this._tab;return z().createElement(z().Fragment,null,this._mayStart&&z().createElement("button",{className:"rbx-button rbx-first",onClick:()=>void e?.perform({do:"start",size:2},x.start.doing(2))},x.start.button(2)),!e&&z().createElement("button",{className:"rbx-button rbx-first",onClick:()=>this._openNotebook(t)},ey.open),z().createElement("button",{className:"rbx-button",onClick:()=>this._tab.close()},ey.close))}_tab;_openNotebook}let eC=["workers","pipeline","autograd","messages"];class ej extends s.MainAreaWidget{name;constructor(e,t,r,n){super({content:new Y.Panel}),this.name=e,this._path=t,this._sessions=r,this.id=`rpcbench-panel-${ek.UUID.uuid4()}`,this.addClass("rbx-tab"),this.toolbar.hide(),this.title.icon=L,this.title.closable=!0,this.content.addClass("rbx-board"),this.content.toggleClass("rbx-dashboard",e===m),this.content.addWidget(this._note=new eE(this,n)),this._parts=(e===m?eC:[e]).map(e=>new eN(e)),this._parts.forEach(e=>this.content.addWidget(e)),this._drawTitle(),r.opened.connect(this._connect,this),this._connect()}get isRestored(){return this._isRestored}set isRestored(e){this._isRestored=e,this._note.update()}get notebook(){return this._notebook}get session(){return this._notebook&&this._sessions.forPanel(this._notebook)}get path(){return this._notebook?.context.path??this._path}get isDrawn(){return this._parts.some(e=>e.isDrawn)}_connect(){let e=this._sessions.find(this._path);e&&!this._notebook&&(this._notebook=e,this._sessions.opened.disconnect(this._connect,this),this._sessions.forPanel(e).changed.connect(this._refresh,this),e.disposed.connect(this.dispose,this),e.context.pathChanged.connect(this._drawTitle,this)),this._refresh()}_drawTitle(){this.title.label=x.panels.tab(this.name,this.path.split("/").at(-1)??""),this.title.caption=x.panels.caption(this.name,this.path)}_refresh(){let{session:e,notebook:t}=this,r=e?.state??null;(e?.phase==="none"||e?.phase==="absent"||r&&!r.clusters.some(({number:e})=>e===this._cluster))&&(this._cluster=u(r)?.number,this._parts.forEach(e=>e.expire())),e&&t&&void 0!==this._cluster&&r&&this._parts.forEach(r=>r.ask(e,t)),this._note.update()}_path;_sessions;_note;_parts;_notebook=null;_cluster;_isRestored=!1}class eN extends Y.Panel{constructor(e){super(),this._name=e,this.addClass("rbx-part"),this.node.dataset.panel=e}get isDrawn(){return null!==this._output}ask(e,t){this._isExpired&&e.kernel&&(this._isExpired=!1,this._comm?.close(),this._comm=new es(e.kernel,{isPanel:!0,onMessage:e=>this._draw(t,e.bundle),onEnd:e=>this._onEnd(e)}),this._comm.open({do:"panel",name:this._name}))}expire(){this._isExpired=!0}dispose(){this._comm?.close(),this._comm=null,super.dispose()}_draw(e,t){let r=new ev.OutputAreaModel({trusted:!0});this._put(new ev.SimplifiedOutputArea({model:r,rendermime:e.content.rendermime})),r.add({output_type:"display_data",data:t,metadata:{}})}_onEnd({error:e,gone:t}){if(this._comm=null,"string"!=typeof e||t)this.expire();else{let t=document.createElement("p");t.className="rbx-bad",t.setAttribute("role","alert"),t.textContent=`${this._name}: ${e}`,this._put(new Y.Widget({node:t}))}}_put(e){this._output?.dispose(),this._output=e,this.addWidget(e)}_name;_comm=null;_output=null;_isExpired=!0}let eS=new Set(["workers","rrefs","autograd","pipeline","messages"]);function e$(e,t){let{node:r}=e.content,n=0,s=()=>{n=0,r.querySelectorAll(".rb-still[data-at]").forEach(r=>{var n,s,a,o,i,l;let c,d,h,p,u;return n=r,s=e,a=t,p=n.querySelector(".rbx-still")??(o=n,i=s,l=a,c=new Date(1e3*Number(o.dataset.at)).toLocaleTimeString([],{hour:"2-digit",minute:"2-digit"}),(d=document.createElement("button")).className="rbx-button",d.textContent=x.panels.showLive,d.addEventListener("click",()=>(function(e,t,r){let n=e.closest(".jp-OutputArea-child")?.previousElementSibling;if(!n)return;[...n.children].forEach(e=>e.toggleAttribute("hidden",!0));let s=new eN(e.dataset.panel??"");Y.Widget.attach(s,n);let a=new MutationObserver(()=>{s.node.isConnected||(a.disconnect(),s.dispose())});a.observe(t.content.node,{childList:!0,subtree:!0}),t.disposed.connect(()=>s.dispose()),s.ask(r,t)})(o,i,l)),(h=document.createElement("p")).className="rbx-still",h.append(`${x.panels.picture(c)} `,d),o.prepend(h),h),u=!!a.state?.clusters.length&&eS.has(n.dataset.panel??""),void p.querySelector("button")?.toggleAttribute("hidden",!u)})},a=()=>{n||=requestAnimationFrame(s)},o=new MutationObserver(a);o.observe(r,{childList:!0,subtree:!0}),t.changed.connect(a),e.disposed.connect(()=>{o.disconnect(),cancelAnimationFrame(n)}),a()}let eT="rpcbench:restore-panel";class eA{constructor(e,t,r){this._app=e,this._sessions=t;let n=e=>{this._app.shell.add(this._make(e.name??m,e.path??""),"main",{activate:!1})};e.commands.addCommand(eT,{execute:n}),r?.restore(this._tracker,{command:eT,args:({name:e,path:t})=>({name:e,path:t}),name:({name:e,path:t})=>`${e}:${t}`}),e.restored.then(()=>this._tracker.forEach(e=>e.isRestored=!0))}open(e,t){let{shell:r}=this._app,n=this._tracker.find(r=>r.name===t&&r.notebook===e);if(n)return r.activateById(n.id);let s=this._others(e),a=this._make(t,e.context.path);if(a.isRestored=!0,"JupyterLab"!==this._app.name)r.add(a,"down"),r.activateById(a.id);else if(s.length)r.add(a,"main",{mode:"tab-after",ref:s.at(-1)});else{let n=t===m&&e.node.clientWidth<1e3;r.add(a,"main",{mode:n?"split-bottom":"split-right",ref:e.id})}}_others(e){let t=new Set(this._app.shell.widgets("main")),r=this._tracker.filter(e=>t.has(e)),n=r.filter(t=>t.notebook===e);return(n.length?n:r).map(e=>e.id)}_make(e,t){let r=e=>void this._app.commands.execute("docmanager:open",{path:e}),n=new ej(e,t,this._sessions,r);return this._tracker.add(n),n.title.changed.connect(()=>void this._tracker.save(n)),n}_app;_sessions;_tracker=new s.WidgetTracker({namespace:"rpcbench-panels"})}r(15);let eI={id:"jupyter-rpcbench:plugin",description:"Workers in a sidebar, a target for each cell, panels as tabs, a start page.",autoStart:!0,requires:[o.INotebookTracker],optional:[s.ICommandPalette,s.IToolbarWidgetRegistry,i.IStatusBar,n.ILayoutRestorer,n.ILabShell,a.ILauncher],activate:(e,t,r,n,a,o,i,l)=>{var c;let d,h,p,b=new ei(t),g=new v(b,new eA(e,b,i&&o)),f=new ex(b,g);if(e.shell.add(f,i?"left":"right",{rank:600}),o?.add(f,f.id),d=()=>null!==b.current&&["absent","loaded"].includes(b.current.phase),h=()=>void 0!==u(b.current?.state??null),(p=(t,n,s)=>{e.commands.addCommand(`rpcbench:${t}`,{label:C[t],isEnabled:n,execute:s}),r?.addItem({command:`rpcbench:${t}`,category:E})})("start",d,({size:e})=>g.start(e)),p("scale",h,({size:e})=>g.scale(void 0,e)),p("restart",h,()=>g.restart()),p("interrupt",h,()=>g.interrupt()),p("stop",h,()=>g.stop()),p("dashboard",d,()=>g.openPanel(m)),p("panel",h,({name:e})=>g.openPanel(e)),p("target",h,({target:e})=>g.setTarget(e)),p("sidebar",()=>!0,async()=>e.shell.activateById("rpcbench-sidebar")),b.changed.connect(()=>e.commands.notifyCommandChanged()),i&&function(e,t,r,n){var a;let o=new s.WidgetTracker({namespace:"rpcbench-start"}),{commands:i,serviceManager:l}=e,c=e=>void i.execute("docmanager:open",{path:e,factory:"Notebook"}),d=async({cwd:e=""})=>c(await Q(l,e));i.addCommand(G,{label:x.commands.startPage,caption:x.startPage.caption,icon:L,execute:()=>{let t=o.currentWidget??o.find(()=>!0);t||((t=new s.MainAreaWidget({content:new q(l.contents,c,()=>void d({}))})).id="rpcbench-start-page-tab",t.toolbar.hide(),o.add(t),e.shell.add(t,"main",{mode:"tab-after"})),e.shell.activateById(t.id)}}),i.addCommand(V,{label:e=>e.isLauncher?x.startPage.newTitle:x.commands.notebook,caption:x.startPage.newCaption,icon:L,execute:d}),[V,G].forEach((e,n)=>{t?.addItem({command:e,category:Z}),r?.add({command:e,category:Z,rank:n,args:{isLauncher:!0}})}),n?.restore(o,{command:G,name:()=>"page"}),a=e,T.PageConfig.getOption(X)&&!window.sessionStorage.getItem(X)&&(window.sessionStorage.setItem(X,"done"),a.restored.then(()=>a.commands.execute(G)))}(e,r,l,o),n?.addFactory("Cell","rpcbench-target",e=>new ee(e,b)),t.widgetAdded.connect((e,t)=>$(t)),t.forEach($),t.widgetAdded.connect((e,t)=>e$(t,b.forPanel(t))),t.forEach(e=>e$(e,b.forPanel(e))),c=t=>e.shell.activateById(t),document.addEventListener("rpcbench:reveal",e=>{let r=e.detail?.cell,n=e=>e.model.id===r,s=t.find(e=>e.content.widgets.some(n));if(!s)return;e.preventDefault();let{content:a}=s,o=a.widgets.findIndex(n);c(s.id),a.activeCellIndex=o,a.deselectAll(),a.scrollToItem(o,"center").then(()=>{a.widgets[o]?.node.animate([{backgroundColor:"rgb(230 159 0 / 35%)"},{}],1500)})}),a){let t=new ew(b,()=>e.shell.activateById(f.id)),r={align:"left",rank:5,isActive:()=>t.isShown,activeStateChanged:b.changed};a.registerStatusItem("rpcbench:workers",{item:t,...r})}}}},22(e,t,r){var n=r(23),s=r.n(n),a=r(24),o=(r.n(a))()(s());o.push([e.id,`/* All colours are JupyterLab's own, so every theme works. A shape and a word show each state besides its colour. Classes begin
   with \`rbx-\`: \`rb-\` is for panels, which have styles of their own in the same page. */
.rbx-sidebar {
  display: flex;
  flex-direction: column;
  gap: 12px;
  min-width: 220px;
  padding: 0 0 12px;
  overflow: auto;
  background: var(--jp-layout-color1);
  color: var(--jp-ui-font-color1);
  font-size: var(--jp-ui-font-size1);
}
.rbx-sidebar .rbx-head {
  display: flex;
  align-items: baseline;
  gap: 8px;
  padding: 8px 12px;
  border-bottom: var(--jp-border-width) solid var(--jp-border-color2);
}
.rbx-sidebar h2,
.rbx-sidebar h3 {
  margin: 0;
  font-size: var(--jp-ui-font-size1);
  font-weight: 600;
}
.rbx-of,
.rbx-about,
.rbx-hint {
  color: var(--jp-ui-font-color2);
}
.rbx-of {
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}
.rbx-about {
  overflow-wrap: anywhere;
}
.rbx-still {
  margin: 0;
  padding: 2px 12px 6px;
  color: var(--jp-ui-font-color2);
}
.rbx-now {
  display: flex;
  flex: 1 1 100%;
  flex-direction: column;
  min-width: 0;
}
.rbx-now .rbx-about {
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}
.rbx-lost .rbx-now .rbx-about {
  white-space: normal;
}
.rbx-sidebar > .rbx-hint,
.rbx-start,
.rbx-modes,
.rbx-panels,
.rbx-news {
  margin: 0;
  padding: 0 12px;
}
/* A name, and what there is to say about it: beside the name where that fits, else below it. Nothing is cut. */
.rbx-text {
  display: flex;
  flex: 1;
  flex-wrap: wrap;
  align-items: baseline;
  gap: 0 6px;
  min-width: 0;
}
.rbx-cluster > header {
  display: flex;
  align-items: center;
  gap: 6px;
  padding: 0 8px 4px 12px;
}
.rbx-cluster ul {
  margin: 0;
  padding: 0;
  list-style: none;
}
.rbx-worker {
  display: flex;
  align-items: center;
  gap: 6px;
  min-height: 28px;
  padding: 2px 8px 2px 12px;
}
.rbx-worker:hover {
  background: var(--jp-layout-color2);
}
.rbx-worker[draggable='true'] {
  cursor: grab;
}
.rbx-mark {
  flex: none;
  fill: currentcolor;
  color: var(--jp-success-color1);
}
.rbx-mark .rbx-hollow {
  fill: none;
  stroke: currentcolor;
  stroke-width: 2;
}
.rbx-busy .rbx-mark {
  color: var(--jp-brand-color1);
}
.rbx-starting .rbx-mark,
.rbx-stopped .rbx-mark {
  color: var(--jp-ui-font-color2);
}
.rbx-lost .rbx-mark,
.rbx-lost .rbx-about,
.rbx-bad {
  color: var(--jp-error-color1);
}
.rbx-button,
.rbx-icon,
.rbx-status-button {
  border: var(--jp-border-width) solid var(--jp-border-color1);
  border-radius: var(--jp-border-radius);
  background: var(--jp-layout-color1);
  color: var(--jp-ui-font-color1);
  font-family: inherit;
  font-size: inherit;
  cursor: pointer;
}
.rbx-button {
  padding: 3px 10px;
}
.rbx-first {
  border-color: var(--jp-brand-color1);
  background: var(--jp-brand-color1);
  color: var(--jp-ui-inverse-font-color1);
}
.rbx-icon {
  display: inline-flex;
  flex: none;
  padding: 3px;
  border-color: transparent;
  background: none;
}
.rbx-icon + .rbx-icon {
  margin-left: -4px;
}
.rbx-flip svg {
  transform: scaleX(-1);
}
.rbx-chip {
  display: inline-flex;
  align-items: center;
  gap: 4px;
  padding: 0 4px 0 8px;
  border: var(--jp-border-width) solid var(--jp-warn-color1);
  border-radius: 9px;
  background: color-mix(in srgb, var(--jp-warn-color1) 18%, var(--jp-layout-color1));
  color: var(--jp-ui-font-color0);
  font: inherit;
  line-height: 16px;
  cursor: pointer;
}
.rbx-chip:hover {
  background: color-mix(in srgb, var(--jp-warn-color1) 36%, var(--jp-layout-color1));
}
.rbx-chip svg {
  display: block;
  width: 12px;
  height: 12px;
}
.rbx-modes {
  display: flex;
  flex-wrap: wrap;
  gap: 6px;
}
.rbx-progress progress {
  display: block;
  width: 100%;
  height: 6px;
  margin: 4px 0;
  accent-color: var(--jp-brand-color1);
}
.rbx-button:hover:not(:disabled),
.rbx-icon:hover:not([aria-disabled='true']) {
  background: var(--jp-layout-color3);
  color: var(--jp-ui-font-color1);
}
.rbx-first:hover:not(:disabled) {
  background: var(--jp-brand-color0);
  color: var(--jp-ui-inverse-font-color1);
}
.rbx-button:disabled,
.rbx-icon[aria-disabled='true'] {
  opacity: 0.4;
  cursor: default;
}
.rbx-sidebar :focus-visible,
.rbx-status-button:focus-visible {
  outline: 2px solid var(--jp-brand-color1);
  outline-offset: 1px;
}
.rbx-start {
  display: flex;
  flex-wrap: wrap;
  align-items: center;
  gap: 8px;
}
.rbx-start input {
  width: 4em;
  padding: 2px 4px;
  border: var(--jp-border-width) solid var(--jp-border-color1);
  background: var(--jp-layout-color1);
  color: inherit;
  font: inherit;
}
.rbx-start .rbx-hint {
  flex-basis: 100%;
  margin: 0;
}
.rbx-panels > div {
  display: flex;
  flex-wrap: wrap;
  gap: 6px;
  padding-top: 6px;
}
.rbx-news {
  white-space: pre-wrap;
  overflow-wrap: anywhere;
}
.rbx-status {
  display: flex;
  align-items: center;
  gap: 6px;
  color: var(--jp-ui-font-color1);
  font-size: var(--jp-ui-font-size1);
}
.rbx-status-button {
  border: 0;
  background: none;
  font-size: var(--jp-ui-font-size1);
}
.rbx-picker.jp-HTMLSelect {
  display: flex;
  align-items: center;
}
.rbx-picker.jp-HTMLSelect select {
  max-width: 12em;
  overflow: hidden;
  text-overflow: ellipsis;
}
/* JupyterLab hides a cell's toolbar that would overlap the code. Then only the picker is shown, above the code. While
   JupyterLab measures the overlap, it removes the class \`jp-toolbar-overlap\`, so these rules do not apply. */
.jp-toolbar-overlap .jp-InputArea:has(> .jp-cell-toolbar > .rbx-settled:not(.lm-mod-hidden)) {
  padding-top: 28px;
}
.jp-toolbar-overlap .jp-cell-toolbar:has(> .rbx-settled:not(.lm-mod-hidden)) {
  display: flex;
  top: 0;
}
.jp-toolbar-overlap .jp-cell-toolbar > :not(.rbx-picker) {
  display: none;
}
/* The cell under a worker that is dragged, and where it would run. */
.rbx-over::after {
  position: absolute;
  z-index: 20;
  inset: 0;
  display: flex;
  align-items: center;
  justify-content: center;
  border: 2px solid var(--jp-brand-color1);
  border-radius: var(--jp-border-radius);
  background: color-mix(in srgb, var(--jp-brand-color1) 14%, transparent);
  color: var(--jp-ui-font-color0);
  font-size: var(--jp-ui-font-size2);
  font-weight: 600;
  content: attr(data-rbx-drop);
  pointer-events: none;
}
/* All panels of the dashboard at a glance: each scrolls by itself. */
.rbx-dashboard .rb-panel .rb-body {
  max-height: 270px;
}
/* A tab of panels. Two stand beside each other where both can be read. */
.rbx-board {
  display: grid;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr));
  gap: 8px;
  align-content: start;
  align-items: start;
  padding: 8px;
  overflow: auto;
  background: var(--jp-layout-color1);
}
.rbx-note {
  grid-column: 1 / -1;
  padding: 8px 12px;
  border-left: 3px solid var(--jp-warn-color1);
  background: var(--jp-layout-color2);
  color: var(--jp-ui-font-color1);
  font-size: var(--jp-ui-font-size1);
}
.rbx-note > div,
.rbx-deeds {
  display: flex;
  flex-wrap: wrap;
  align-items: center;
  gap: 6px 12px;
}
.rbx-part > .rbx-bad {
  padding: 8px;
}
.rbx-start-page {
  overflow: auto;
  background: var(--jp-layout-color1);
  color: var(--jp-ui-font-color1);
  font-size: var(--jp-ui-font-size1);
}
.rbx-page {
  max-width: 1180px;
  margin: 0 auto;
  padding: 28px 32px 40px;
}
.rbx-start-page header {
  display: flex;
  flex-wrap: wrap;
  align-items: center;
  gap: 12px 18px;
}
.rbx-start-page header svg {
  display: block;
  width: 44px;
  height: 44px;
}
.rbx-start-page header > div {
  flex: 1 1 340px;
}
.rbx-start-page h1 {
  margin: 0;
  font-size: 28px;
  font-weight: 600;
}
.rbx-start-page h2 {
  margin: 28px 0 12px;
  font-size: var(--jp-ui-font-size3);
  font-weight: 600;
}
.rbx-start-page p {
  margin: 2px 0 0;
  font-size: var(--jp-ui-font-size2);
}
.rbx-start-page ol {
  display: grid;
  grid-template-columns: repeat(auto-fill, minmax(200px, 1fr));
  gap: 16px;
  margin: 0;
  padding: 0;
  list-style: none;
}
.rbx-new {
  display: grid;
  gap: 2px;
  padding: 10px 18px;
  border-color: var(--jp-brand-color1);
  text-align: left;
}
.rbx-new b {
  color: var(--jp-brand-color1);
  font-size: var(--jp-ui-font-size2);
}
.rbx-card {
  position: relative;
  display: grid;
  grid-template: auto auto 1fr auto / 1fr;
  gap: 4px;
  width: 100%;
  height: 100%;
  padding: 0 14px 12px;
  border: var(--jp-border-width) solid var(--jp-border-color2);
  border-radius: 8px;
  background: var(--jp-layout-color1);
  color: var(--jp-ui-font-color1);
  font: inherit;
  text-align: left;
  overflow: hidden;
  cursor: pointer;
}
.rbx-card:hover {
  border-color: var(--jp-brand-color1);
  box-shadow: var(--jp-elevation-z2);
}
.rbx-card img {
  justify-self: stretch;
  width: calc(100% + 28px);
  height: auto;
  margin: 0 -14px 8px;
  background: var(--jp-layout-color2);
}
.rbx-title {
  font-size: var(--jp-ui-font-size2);
  font-weight: 600;
}
.rbx-what,
.rbx-minutes {
  color: var(--jp-ui-font-color2);
}
.rbx-here {
  position: absolute;
  top: 10px;
  left: 10px;
  padding: 2px 10px;
  border-radius: 10px;
  background: var(--jp-brand-color0);
  color: var(--jp-ui-inverse-font-color0);
  font-weight: 600;
}
.rbx-new:focus-visible,
.rbx-card:focus-visible,
.rbx-chip:focus-visible,
.rbx-note :focus-visible {
  outline: 2px solid var(--jp-brand-color1);
  outline-offset: 2px;
}
`,""]),r.d(t,{},{A:o})},24(e){e.exports=function(e){var t=[];return t.toString=function(){return this.map(function(t){var r="",n=void 0!==t[5];return t[4]&&(r+="@supports (".concat(t[4],") {")),t[2]&&(r+="@media ".concat(t[2]," {")),n&&(r+="@layer".concat(t[5].length>0?" ".concat(t[5]):""," {")),r+=e(t),n&&(r+="}"),t[2]&&(r+="}"),t[4]&&(r+="}"),r}).join("")},t.i=function(e,r,n,s,a){"string"==typeof e&&(e=[[null,e,void 0]]);var o={};if(n)for(var i=0;i<this.length;i++){var l=this[i][0];null!=l&&(o[l]=!0)}for(var c=0;c<e.length;c++){var d=[].concat(e[c]);n&&o[d[0]]||(void 0!==a&&(void 0===d[5]||(d[1]="@layer".concat(d[5].length>0?" ".concat(d[5]):""," {").concat(d[1],"}")),d[5]=a),r&&(d[2]&&(d[1]="@media ".concat(d[2]," {").concat(d[1],"}")),d[2]=r),s&&(d[4]?(d[1]="@supports (".concat(d[4],") {").concat(d[1],"}"),d[4]=s):d[4]="".concat(s)),t.push(d))}},t}},23(e){e.exports=function(e){return e[1]}},15(e,t,r){r.r(t);var n=r(16),s=r.n(n),a=r(17),o=r.n(a),i=r(18),l=r.n(i),c=r(19),d=r.n(c),h=r(20),p=r.n(h),u=r(21),b=r.n(u),m=r(22),g={};g.styleTagTransform=b(),g.setAttributes=d(),g.insert=l().bind(null,"head"),g.domAPI=o(),g.insertStyleElement=p(),s()(m.A,g);let x=m.A&&m.A.locals?m.A.locals:void 0;r.d(t,{},{default:x})},16(e){var t=[];function r(e){for(var r=-1,n=0;n<t.length;n++)if(t[n].identifier===e){r=n;break}return r}function n(e,n){for(var s={},a=[],o=0;o<e.length;o++){var i=e[o],l=n.base?i[0]+n.base:i[0],c=s[l]||0,d="".concat(l," ").concat(c);s[l]=c+1;var h=r(d),p={css:i[1],media:i[2],sourceMap:i[3],supports:i[4],layer:i[5]};if(-1!==h)t[h].references++,t[h].updater(p);else{var u=function(e,t){var r=t.domAPI(t);return r.update(e),function(t){t?(t.css!==e.css||t.media!==e.media||t.sourceMap!==e.sourceMap||t.supports!==e.supports||t.layer!==e.layer)&&r.update(e=t):r.remove()}}(p,n);n.byIndex=o,t.splice(o,0,{identifier:d,updater:u,references:1})}a.push(d)}return a}e.exports=function(e,s){var a=n(e=e||[],s=s||{});return function(e){e=e||[];for(var o=0;o<a.length;o++){var i=r(a[o]);t[i].references--}for(var l=n(e,s),c=0;c<a.length;c++){var d=r(a[c]);0===t[d].references&&(t[d].updater(),t.splice(d,1))}a=l}}},18(e){var t={};e.exports=function(e,r){var n=function(e){if(void 0===t[e]){var r=document.querySelector(e);if(window.HTMLIFrameElement&&r instanceof window.HTMLIFrameElement)try{r=r.contentDocument.head}catch(e){r=null}t[e]=r}return t[e]}(e);if(!n)throw Error("Couldn't find a style target. This probably means that the value for the 'insert' parameter is invalid.");n.appendChild(r)}},20(e){e.exports=function(e){var t=document.createElement("style");return e.setAttributes(t,e.attributes),e.insert(t,e.options),t}},19(e,t,r){e.exports=function(e){var t=r.nc;t&&e.setAttribute("nonce",t)}},17(e){e.exports=function(e){if("u"<typeof document)return{update:function(){},remove:function(){}};var t=e.insertStyleElement(e);return{update:function(r){var n,s,a;n="",r.supports&&(n+="@supports (".concat(r.supports,") {")),r.media&&(n+="@media ".concat(r.media," {")),(s=void 0!==r.layer)&&(n+="@layer".concat(r.layer.length>0?" ".concat(r.layer):""," {")),n+=r.css,s&&(n+="}"),r.media&&(n+="}"),r.supports&&(n+="}"),(a=r.sourceMap)&&"u">typeof btoa&&(n+="\n/*# sourceMappingURL=data:application/json;base64,".concat(btoa(unescape(encodeURIComponent(JSON.stringify(a))))," */")),e.styleTagTransform(n,t,e.options)},remove:function(){var e;null===(e=t).parentNode||e.parentNode.removeChild(e)}}}},21(e){e.exports=function(e,t){if(t.styleSheet)t.styleSheet.cssText=e;else{for(;t.firstChild;)t.removeChild(t.firstChild);t.appendChild(document.createTextNode(e))}}}}]);