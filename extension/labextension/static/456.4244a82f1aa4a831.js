"use strict";(self.rspackChunkrpcbench=self.rspackChunkrpcbench||[]).push([[456],{2(e,t,r){r.r(t),r.d(t,{default:()=>Z});var n=r(3),s=r(4),a=r(5),o=r(6);let i=/^(\s*)%%remote(?![^\s])([^\n]*)(\n|$)/,l=/(?:"[^"]*"|'[^']*'|[^\s"'])+/g,c=new Set(["-i","-o","--rref","--timeout"]);function d(e){let t=[],r=[],n=!1;for(let s of e.match(l)??[])(n||s.startsWith("-")?r:t).push(s),n=!n&&c.has(s);return{targets:t,options:r}}function h(e,t){if(e?.model.type!=="code")return!1;let r=e.model.sharedModel,n=function(e,t){let r=i.exec(e);if(!r)return null===t?null:{start:0,end:0,text:`%%remote ${t}
`};let n=r[1]?.length??0;if(null===t)return{start:n,end:r[0].length,text:""};let{targets:s,options:a}=d(r[2]??""),o=r[0].length-(r[3]?.length??0);return s.join(" ")===t?null:{start:n,end:o,text:["%%remote",t,...a].join(" ")}}(r.source,t);return n&&r.updateSource(n.start,n.end,n.text),!0}function u(e){return e?.clusters.find(e=>e.current)}function p(e){return`${e} worker${1===e?"":"s"}`}var b=r(7),m=r(8);let g=["restarting","autorestarting","terminating","dead"];class f{constructor(e,t){this._kernel=e,this._handlers=t,this._comm=e.createComm("rpcbench"),this._comm.onMsg=e=>t.onMessage?.(e.content.data),this._comm.onClose=e=>this._end(e.content.data),e.statusChanged.connect(this._onStatus,this)}get id(){return this._comm.commId}async open(e){await this._kernel.info,this._kernel.supportsSubshells&&"subshellStarted"in this._comm&&await this._comm.subshellStarted,this._isClosed||this._comm.open(e)}close(){this._detach(),this._comm.isDisposed||this._kernel.isDisposed||this._comm.close()}_onStatus(e,t){g.includes(t)&&this._end({error:"the kernel is gone"})}_end(e){this._isClosed||(this._detach(),this._handlers.onEnd(e))}_detach(){this._isClosed=!0,this._kernel.statusChanged.disconnect(this._onStatus,this)}_kernel;_handlers;_comm;_isClosed=!1}async function _(e,t){return new Promise((r,n)=>{new f(e,{onEnd:e=>r(e)}).open({...t}).catch(n)})}var w=r(9);let v=`<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16" viewBox="0 0 24 24">
  <g class="jp-icon3" fill="#616161">
    <rect x="2" y="14" width="20" height="2.4" rx="1"/>
    <rect x="4.5" y="16" width="2.4" height="6" rx="1"/>
    <rect x="17.1" y="16" width="2.4" height="6" rx="1"/>
    <rect x="4" y="6" width="6.5" height="6.5" rx="1.4"/>
    <circle cx="16.8" cy="9.2" r="3.4"/>
  </g>
</svg>`,k=`<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">
  <path class="jp-icon3" fill="#616161" d="M19 13H5v-2h14z"/>
</svg>`,y=new w.LabIcon({name:"rpcbench:fewer",svgstr:k}),x=new w.LabIcon({name:"rpcbench:bench",svgstr:v});async function E(e,t,r,n){if(!r.kernel)return;let a=null,o=new f(r.kernel,{onMessage:r=>{var i,l,c,d,h;let u,p,g;a??=(i=e,l=t,c=n,d=r.bundle,h=()=>o.close(),u=new b.OutputAreaModel({trusted:!0}),p=new b.SimplifiedOutputArea({model:u,rendermime:l.content.rendermime}),(g=new s.MainAreaWidget({content:p})).id=`rpcbench-panel-${m.UUID.uuid4()}`,g.addClass("rb-tab"),g.toolbar.hide(),g.title.label=`${c}: ${l.title.label}`,g.title.caption=`The panel ${c} of ${l.context.path}`,g.title.icon=x,g.title.closable=!0,g.disposed.connect(h),u.add({output_type:"display_data",data:d,metadata:{}}),"JupyterLab"===i.name?i.shell.add(g,"main",{mode:"split-right",ref:l.id}):(i.shell.add(g,"down"),i.shell.activateById(g.id)),g)},onEnd:e=>{a?.dispose(),"string"==typeof e.error&&r.notify(e.error,!0)}});t.disposed.connect(()=>a?.dispose()),await o.open({do:"panel",name:n})}class C{constructor(e,t){this._app=e,this._sessions=t}async start(e){let t=e??await this._askNumber("Start workers",2);t&&await this._sessions.current?.perform({do:"start",size:t})}async scale(e=this._cluster,t){let r=e&&(t??await this._askNumber("How many workers should there be?",e.workers.length));e&&r&&await this._mayShrink(e,r)&&await this._act(e,"scale",String(r))}async restart(e=this._cluster,t){let r=t??(e&&await this._askWorker(e,"Restart a worker"));if(!e||!r)return;let n=`${r.name} is still running. Everything it holds will be lost.`;("lost"===r.state||await S(`Restart ${r.name}?`,n,"Restart"))&&await this._act(e,"restart",r.name)}async interrupt(e=this._cluster,t="all"){e&&await this._act(e,"interrupt",t)}async stop(e=this._cluster){e&&await S(`Stop ${p(e.workers.length)}?`,"Everything its workers hold will be lost.","Stop")&&await this._act(e,"stop","all")}async use(e){await this._sessions.current?.perform({do:"use",of:e.name})}async openPanel(e){let{current:t,notebook:r}=this._sessions,n=e??await j("Open a panel",t?.state?.panels??[]);t&&r&&n&&await E(this._app,r,t,n)}async setTarget(e){let{current:t,notebook:r}=this._sessions,n=this._cluster?.workers.map(e=>e.name)??[],s=e??await j("Run this cell on",["notebook",...n,"all"]);s&&!h(r?.content.activeCell,"notebook"===s?null:s)&&t?.notify("Choose a code cell first: only code cells have a target.",!0)}async _act(e,t,r){await this._sessions.current?.perform({do:"act",of:e.name,action:t,target:r})}get _cluster(){return u(this._sessions.current?.state??null)}async _askNumber(e,t){let r=await s.InputDialog.getNumber({title:e,value:t,label:"Workers"});return r.button.accept&&r.value&&r.value>=1?Math.floor(r.value):null}async _askWorker(e,t){let r=await j(t,e.workers.map(e=>e.name));return e.workers.find(e=>e.name===r)}async _mayShrink(e,t){let r=e.workers.length-t;return r<=0||S(`End ${p(r)}?`,"Everything they hold will be lost.","End")}_app;_sessions}async function S(e,t,r){let n=[s.Dialog.cancelButton(),s.Dialog.warnButton({label:r})];return(await (0,s.showDialog)({title:e,body:t,buttons:n})).button.accept}async function j(e,t){let r=t.length?await s.InputDialog.getItem({title:e,items:t,label:e}):null;return r?.button.accept?r.value:null}let N="application/x-rpcbench-worker",I="rb-over";function $(e){let t=t=>{e.node.querySelectorAll(`.${I}`).forEach(e=>e!==t&&e.classList.remove(I)),t?.classList.add(I)},r=t=>{let r,n=t.dataTransfer?.types.includes(N)?(r=t.target,e.content.widgets.find(e=>"code"===e.model.type&&r instanceof Node&&e.node.contains(r))):void 0;return n&&(t.preventDefault(),t.stopPropagation()),n};e.node.addEventListener("dragover",e=>t(r(e)?.node),!0),e.node.addEventListener("dragleave",()=>t(),!0),e.node.addEventListener("drop",e=>{h(r(e),e.dataTransfer?.getData(N)||null),t()},!0)}var W=r(10);class A extends W.Widget{constructor(e,t){super({node:document.createElement("div")}),this.addClass("rb-picker"),this._cell=e,this._sessions=t,this._select.title="Where this cell runs: its first line, %%remote. Options on that line stay when the target changes; 'notebook' removes the line (undo brings it back).",this._select.setAttribute("aria-label","Runs on"),this._select.dataset.lmSuppressShortcuts="true",this._select.addEventListener("change",()=>h(e,this._select.value||null)),this.node.append(this._select),e.model.contentChanged.connect(this._draw,this),this._draw()}dispose(){this.isDisposed||(this._session?.changed.disconnect(this._draw,this),this._cell.model?.contentChanged.disconnect(this._draw,this),super.dispose())}onAfterAttach(){requestIdleCallback(()=>requestIdleCallback(()=>this.addClass("rb-settled")))}_draw(){var e;let t;if(this.isDisposed||this._cell.isDisposed)return;this._updateSession();let r=(e=this._cell.model.sharedModel.source,(t=i.exec(e))?d(t[2]??"").targets.join(" "):null),n=this._options(r),s=JSON.stringify(n);s!==this._drawn&&(this._drawn=s,this._select.replaceChildren(...n.map(([e,t])=>new Option(t,e)))),this._select.value=r??"",this.setHidden(null===r&&this._session?.phase!=="loaded")}_options(e){let t=this._session?.state?.auto,r=u(this._session?.state??null)?.workers??[],n=[["",t?`${t} (%autoremote)`:"notebook"],...r.map(({name:e,state:t})=>[e,"lost"===t?`${e} (lost)`:e])];return r.length>1&&n.push(["all","all"]),null===e||n.some(([t])=>t===e)||n.push([e,e||"(no target yet)"]),n}_updateSession(){let e=this._sessions.forCell(this._cell);e!==this._session&&(this._session?.changed.disconnect(this._draw,this),e?.changed.connect(this._draw,this),this._session=e)}_cell;_sessions;_select=document.createElement("select");_session=null;_drawn=""}var D=r(11);let T="%load_ext rpcbench";class M{constructor(e){this._context=e,e.kernelChanged.connect(this._onKernelChanged,this),e.statusChanged.connect(this._onStatus,this),this._renewalTimer=window.setInterval(()=>void this._renew(),3e4),this._onKernelChanged()}changed=new D.Signal(this);get phase(){return this._phase}get state(){return this._state}get notice(){return this._notice}get kernel(){return this._context.session?.kernel??null}get isDisposed(){return this._isDisposed}dispose(){this._isDisposed=!0,window.clearInterval(this._renewalTimer),this._closeWatch(),D.Signal.clearData(this)}notify(e,t=!1){this._notice=e?{text:e,isError:t}:null,this.changed.emit()}async perform(e){if(this.notify(""),"absent"===this._phase&&!await this._load())return;let{kernel:t}=this;if(t){let r=await _(t,e).catch(e=>({error:String(e)}));this.notify(r.error??r.text??"rpcbench is no longer loaded in this kernel.",!r.text)}}recheck(){"absent"===this._phase&&this._detect()}_onKernelChanged(){this._closeWatch(),this._setPhase(this.kernel?"unknown":"none"),this._detect()}_onStatus(e,t){"restarting"===t||"autorestarting"===t?(this._closeWatch(),this._setPhase("unknown")):"unknown"!==this._phase||this._isDetecting||this._detect()}async _detect(){this._isDetecting=!0,await this._askWhetherLoaded().finally(()=>this._isDetecting=!1)}async _askWhetherLoaded(){let{kernel:e}=this,t=this._generation;if(!e||"python"!==(await e.info).language_info.name)return this._setPhase("none",t);let r=await e.requestExecute({code:"",silent:!0,store_history:!1,user_expressions:{here:"'rpcbench' in get_ipython().extension_manager.loaded"}}).done.catch(()=>null);if(!r||t!==this._generation||"loaded"===this._phase)return;let n=r.content,s="ok"===n.status&&JSON.stringify(n.user_expressions).includes('"True"');await (s?this._watch():this._setPhase("absent",t))}async _load(){let{kernel:e}=this,t=this._generation;this._setPhase("loading");let r=await e?.requestExecute({code:T,silent:!0,store_history:!1}).done;if(t!==this._generation||!r)return!1;if("ok"!==r.content.status){let e="error"===r.content.status?r.content.evalue:"it was interrupted";return this._setPhase("absent"),this.notify(`${T} failed in this notebook's kernel: ${e}`,!0),!1}return await this._watch(),!0}async _watch(){let{kernel:e}=this;if(!e)return;this._closeWatch();let t=this._generation;this._comm=new f(e,{onMessage:e=>this._onState(e),onEnd:()=>{this._closeWatch(),this._setPhase("absent")}}),this._setPhase("loaded",t),await this._comm.open({do:"watch"})}_onState(e){void 0!==e.problem?this.notify(e.problem,!0):2===e.speaks?(this._state=e,this.changed.emit()):this.notify("This kernel and this page have different versions of rpcbench: install the same version for both.",!0)}async _renew(){let{kernel:e,_comm:t}=this;e&&t&&!1===(await _(e,{do:"stay",watch:t.id})).there&&t===this._comm&&await this._watch()}_closeWatch(){this._generation+=1,this._comm?.close(),this._comm=null,this._state=null}_setPhase(e,t=this._generation){t!==this._generation||this._isDisposed||(this._phase=e,this.changed.emit())}_context;_renewalTimer;_phase="none";_state=null;_notice=null;_comm=null;_generation=0;_isDetecting=!1;_isDisposed=!1}class P{constructor(e){this._tracker=e,e.currentChanged.connect(this._onCurrent,this),a.NotebookActions.executed.connect((t,{notebook:r,cell:n})=>{let s=e.find(e=>e.content===r);s&&n.model.sharedModel.source.includes("rpcbench")&&this.forPanel(s).recheck()}),this._onCurrent()}changed=new D.Signal(this);get notebook(){return this._tracker.currentWidget}get current(){return this.notebook&&this.forPanel(this.notebook)}forPanel(e){let t=this._known.get(e);if(t)return t;let r=new M(e.sessionContext);return this._known.set(e,r),r.changed.connect(()=>r===this.current&&this.changed.emit()),e.disposed.connect(()=>r.dispose()),r}forCell(e){let t=this._tracker.find(t=>t.content.widgets.includes(e));return t?this.forPanel(t):null}_onCurrent(){this.changed.emit()}_tracker;_known=new WeakMap}var L=r(12),z=r.n(L);function R({icon:e,label:t,disabled:r=!1,flip:n=!1,onClick:s}){let a=`rb-icon${n?" rb-flip":""}`;return z().createElement("button",{className:a,title:t,"aria-label":t,"aria-disabled":r,onClick:()=>!r&&s()},z().createElement(e.react,{tag:"span",elementSize:"small"}))}function O({worker:e,cluster:t,disabled:r,actions:n}){let{name:s,state:a}=e,o="lost"===a;return z().createElement("li",{className:`rb-worker rb-${a}`,"data-worker":s,draggable:t.current&&!o,onDragStart:e=>{var t;return t=e.dataTransfer,void(t.setData(N,s),t.setData("text/plain",`%%remote ${s}
`),t.effectAllowed="copy")},title:t.current&&!o?`Drag ${s} to a cell to run the cell there`:void 0},z().createElement(q,{state:a}),z().createElement("span",{className:"rb-name"},s),z().createElement("span",{className:"rb-about"},function({state:e,note:t,start:r,cpu:n}){let s=r>1?[`start ${r}`]:[],a=n>0?[`${n} %`]:[];return(t?[`lost: ${t}`]:[e,...a,...s]).join(" \xb7 ")}(e)),z().createElement("span",{className:"rb-space"}),t.current&&!o&&z().createElement(R,{icon:w.undoIcon,label:`Let the active cell run on ${s}`,onClick:()=>void n.setTarget(s),flip:!0}),!o&&z().createElement(R,{icon:w.stopIcon,label:`Interrupt ${s}`,onClick:()=>void n.interrupt(t,s)}),z().createElement(R,{icon:w.refreshIcon,label:o?`Start ${s} again`:`Restart ${s}`,disabled:r,onClick:()=>void n.restart(t,e)}))}let B={ready:z().createElement("circle",{cx:"6",cy:"6",r:"4.5"}),busy:z().createElement("path",{d:"M2 1.5 10.5 6 2 10.5Z"}),starting:z().createElement("circle",{cx:"6",cy:"6",r:"4",className:"rb-hollow"}),stopped:z().createElement("path",{d:"M2 1.5h3v9H2zM7 1.5h3v9H7z"}),lost:z().createElement("path",{d:"M2 2 10 10M10 2 2 10",className:"rb-hollow"})};function q({state:e}){return z().createElement("svg",{className:"rb-mark",viewBox:"0 0 12 12",width:"12",height:"12","aria-hidden":"true"},B[e])}function H({cluster:e,several:t,disabled:r,actions:n}){let{name:s,kind:a,workers:o}=e,i=[p(o.length),..."process"===a?[]:[a]].join(", ");return z().createElement("section",{className:"rb-cluster","aria-label":`Cluster ${s}`},z().createElement("header",null,z().createElement("h3",null,s),z().createElement("span",{className:"rb-about"},i),t&&e.current&&z().createElement("span",{className:"rb-about"},"current"),t&&!e.current&&z().createElement("button",{className:"rb-button",disabled:r,onClick:()=>void n.use(e)},"use"),z().createElement("span",{className:"rb-space"}),z().createElement(R,{icon:y,label:`One fewer worker for ${s}`,disabled:r||o.length<2,onClick:()=>void n.scale(e,o.length-1)}),z().createElement(R,{icon:w.addIcon,label:`One more worker for ${s}`,disabled:r,onClick:()=>void n.scale(e,o.length+1)}),z().createElement(R,{icon:w.closeIcon,label:`Stop ${s}`,disabled:r,onClick:()=>void n.stop(e)})),z().createElement("ul",null,o.map(t=>z().createElement(O,{key:t.name,worker:t,cluster:e,disabled:r,actions:n}))))}function J({loads:e,disabled:t,actions:r}){let[n,s]=(0,L.useState)(2),a=Number.isInteger(n)&&n>=1;return z().createElement("form",{className:"rb-start",onSubmit:e=>{e.preventDefault(),r.start(n)}},z().createElement("label",null,"Workers"," ",z().createElement("input",{type:"number",min:1,step:1,value:Number.isNaN(n)?"":n,onChange:e=>s(e.target.valueAsNumber)})),z().createElement("button",{type:"submit",className:"rb-button rb-first",disabled:t||!a},"Start ",a&&p(n)),z().createElement("p",{className:"rb-hint"},e&&z().createElement(z().Fragment,null,"Runs ",z().createElement("code",null,"%load_ext rpcbench")," in this notebook's kernel first."," "),"The same as ",z().createElement("code",null,"%cluster start ",a?n:2),"."))}class F extends w.ReactWidget{constructor(e,t){super(),this.id="rpcbench-sidebar",this.addClass("rb-sidebar"),this.title.icon=x,this.title.caption="rpcbench: workers",this.node.setAttribute("role","region"),this.node.setAttribute("aria-label","rpcbench: workers"),this._sessions=e,this._actions=t,e.changed.connect(()=>this.update())}render(){let e=this._sessions.current,t=this._sessions.notebook?.title.label;return z().createElement(z().Fragment,null,z().createElement("header",{className:"rb-head"},z().createElement("h2",null,"Workers"),t&&z().createElement("span",{className:"rb-of"},t)),e?this._body(e):z().createElement("p",{className:"rb-hint"},"Open a notebook to start workers for it."),z().createElement(K,{session:e}))}_body(e){switch(e.phase){case"none":return z().createElement("p",{className:"rb-hint"},"This notebook has no Python kernel.");case"unknown":return z().createElement("p",{className:"rb-hint"},"Waiting for the kernel…");case"loading":return z().createElement("p",{className:"rb-hint"},"Running %load_ext rpcbench in the kernel, once the running cell has ended…");case"absent":return z().createElement(J,{loads:!0,disabled:!1,actions:this._actions});case"loaded":return this._clusters(e)}}_clusters(e){let{state:t}=e;if(!t)return z().createElement("p",{className:"rb-hint"},"Waiting for the kernel…");let r=t.doing.length>0,n=t.clusters.length>1;return z().createElement(z().Fragment,null,t.clusters.map(e=>z().createElement(H,{key:e.name,cluster:e,several:n,disabled:r,actions:this._actions})),0===t.clusters.length&&z().createElement(J,{loads:!1,disabled:r,actions:this._actions}),t.clusters.length>0&&t.panels.length>0&&z().createElement(U,{names:t.panels,actions:this._actions}))}_sessions;_actions}function U({names:e,actions:t}){return z().createElement("section",{className:"rb-panels","aria-label":"Panels"},z().createElement("h3",null,"Panels"),z().createElement("div",null,e.map(e=>z().createElement("button",{key:e,className:"rb-button",onClick:()=>void t.openPanel(e),title:`Open the panel ${e} in a tab`},e))))}function K({session:e}){let t=e?.state?.doing??[],r=e?.notice;return z().createElement("div",{className:"rb-news"},z().createElement("div",{role:"status",className:"rb-doing"},t.join("\n"),!r?.isError&&r?.text),z().createElement("div",{role:"alert",className:"rb-bad"},r?.isError&&r.text))}class X extends w.ReactWidget{constructor(e,t){super(),this.addClass("rb-status"),this._sessions=e,this._activate=t,e.changed.connect(this._onChanged,this),this._onChanged()}get isShown(){return this._sessions.current?.phase==="loaded"}_onChanged(){this.update()}render(){return z().createElement("button",{className:"rb-status-button",onClick:this._activate,title:"Show the workers in the sidebar"},this._text())}_text(){let e=this._sessions.current?.state,t=e?.clusters.flatMap(e=>e.workers)??[],r=t.filter(e=>"lost"===e.state).length;return e?.doing[0]??`rpcbench: ${t.length?p(t.length):"no workers"}${r?`, ${r} lost`:""}`}_sessions;_activate}r(13);let Z={id:"rpcbench:plugin",description:"Workers in a sidebar, a target for each cell, panels as tabs.",autoStart:!0,requires:[a.INotebookTracker],optional:[s.ICommandPalette,s.IToolbarWidgetRegistry,o.IStatusBar,n.ILayoutRestorer,n.ILabShell],activate:(e,t,r,n,s,a,o)=>{var i;let l,c,d=new P(t),h=new C(e,d),p=new F(d,h);if(e.shell.add(p,o?"left":"right",{rank:600}),a?.add(p,p.id),l=()=>void 0!==u(d.current?.state??null),(c=(t,n,s,a)=>{e.commands.addCommand(`rpcbench:${t}`,{label:n,isEnabled:s,execute:a}),r?.addItem({command:`rpcbench:${t}`,category:"rpcbench"})})("start","Start Workers…",()=>null!==d.current&&["absent","loaded"].includes(d.current.phase),({size:e})=>h.start(e)),c("scale","Change the Number of Workers…",l,({size:e})=>h.scale(void 0,e)),c("restart","Restart a Worker…",l,()=>h.restart()),c("interrupt","Interrupt All Workers",l,()=>h.interrupt()),c("stop","Stop All Workers…",l,()=>h.stop()),c("panel","Open a Panel…",l,({name:e})=>h.openPanel(e)),c("target","Run This Cell on…",l,({target:e})=>h.setTarget(e)),c("sidebar","Show the Sidebar",()=>!0,async()=>e.shell.activateById("rpcbench-sidebar")),d.changed.connect(()=>e.commands.notifyCommandChanged()),n?.addFactory("Cell","rpcbench-target",e=>new A(e,d)),t.widgetAdded.connect((e,t)=>$(t)),t.forEach($),i=t=>e.shell.activateById(t),document.addEventListener("rpcbench:reveal",e=>{let r=e.detail?.cell,n=e=>e.model.id===r,s=t.find(e=>e.content.widgets.some(n));if(!s)return;e.preventDefault();let{content:a}=s,o=a.widgets.findIndex(n);i(s.id),a.activeCellIndex=o,a.deselectAll(),a.scrollToItem(o,"center").then(()=>{a.widgets[o]?.node.animate([{backgroundColor:"rgb(230 159 0 / 35%)"},{}],1500)})}),s){let t=new X(d,()=>e.shell.activateById(p.id));s.registerStatusItem("rpcbench:workers",{item:t,align:"left",rank:5,isActive:()=>t.isShown,activeStateChanged:d.changed})}}}},20(e,t,r){var n=r(21),s=r.n(n),a=r(22),o=(r.n(a))()(s());o.push([e.id,`/* All colours are JupyterLab's own, so every theme works. A shape and a word show each state besides its colour. */
.rb-sidebar {
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
.rb-sidebar .rb-head {
  display: flex;
  align-items: baseline;
  gap: 8px;
  padding: 8px 12px;
  border-bottom: var(--jp-border-width) solid var(--jp-border-color2);
}
.rb-sidebar h2,
.rb-sidebar h3 {
  margin: 0;
  font-size: var(--jp-ui-font-size1);
  font-weight: 600;
}
.rb-of,
.rb-about,
.rb-hint {
  color: var(--jp-ui-font-color2);
  font-size: var(--jp-ui-font-size0);
}
.rb-of,
.rb-about {
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}
.rb-sidebar > .rb-hint,
.rb-start,
.rb-panels,
.rb-news {
  margin: 0;
  padding: 0 12px;
}
.rb-space {
  flex: 1;
}
.rb-cluster > header {
  display: flex;
  align-items: center;
  gap: 6px;
  padding: 0 8px 4px 12px;
}
.rb-cluster ul {
  margin: 0;
  padding: 0;
  list-style: none;
}
.rb-worker {
  display: flex;
  align-items: center;
  gap: 6px;
  min-height: 28px;
  padding: 0 8px 0 12px;
}
.rb-worker:hover {
  background: var(--jp-layout-color2);
}
.rb-worker[draggable='true'] {
  cursor: grab;
}
.rb-mark {
  flex: none;
  fill: currentcolor;
  color: var(--jp-success-color1);
}
.rb-mark .rb-hollow {
  fill: none;
  stroke: currentcolor;
  stroke-width: 2;
}
.rb-busy .rb-mark {
  color: var(--jp-brand-color1);
}
.rb-starting .rb-mark,
.rb-stopped .rb-mark {
  color: var(--jp-ui-font-color2);
}
.rb-lost .rb-mark,
.rb-lost .rb-about,
.rb-bad {
  color: var(--jp-error-color1);
}
.rb-button,
.rb-icon,
.rb-status-button {
  border: var(--jp-border-width) solid var(--jp-border-color1);
  border-radius: var(--jp-border-radius);
  background: var(--jp-layout-color1);
  color: var(--jp-ui-font-color1);
  font-family: inherit;
  font-size: inherit;
  cursor: pointer;
}
.rb-button {
  padding: 3px 10px;
}
.rb-first {
  border-color: var(--jp-brand-color1);
  background: var(--jp-brand-color1);
  color: var(--jp-ui-inverse-font-color1);
}
.rb-icon {
  display: inline-flex;
  flex: none;
  padding: 3px;
  border-color: transparent;
  background: none;
}
.rb-flip svg {
  transform: scaleX(-1);
}
.rb-button:hover:not(:disabled),
.rb-icon:hover:not([aria-disabled='true']) {
  background: var(--jp-layout-color3);
  color: var(--jp-ui-font-color1);
}
.rb-button:disabled,
.rb-icon[aria-disabled='true'] {
  opacity: 0.4;
  cursor: default;
}
.rb-sidebar :focus-visible,
.rb-status-button:focus-visible,
.rb-picker select:focus-visible {
  outline: 2px solid var(--jp-brand-color1);
  outline-offset: 1px;
}
.rb-start {
  display: flex;
  flex-wrap: wrap;
  align-items: center;
  gap: 8px;
}
.rb-start input {
  width: 4em;
  padding: 2px 4px;
  border: var(--jp-border-width) solid var(--jp-border-color1);
  background: var(--jp-layout-color1);
  color: inherit;
  font: inherit;
}
.rb-start .rb-hint {
  flex-basis: 100%;
  margin: 0;
}
.rb-panels > div {
  display: flex;
  flex-wrap: wrap;
  gap: 6px;
  padding-top: 6px;
}
.rb-news {
  font-size: var(--jp-ui-font-size0);
  white-space: pre-wrap;
  overflow-wrap: anywhere;
}
.rb-status {
  display: flex;
  align-items: center;
}
.rb-status-button {
  border: 0;
  background: none;
  font-size: var(--jp-ui-font-size1);
}
.rb-picker {
  display: flex;
  align-items: center;
}
.rb-picker select {
  max-width: 8em;
  height: 22px;
  border: var(--jp-border-width) solid var(--jp-border-color2);
  border-radius: var(--jp-border-radius);
  background: var(--jp-layout-color1);
  color: var(--jp-ui-font-color1);
  font-size: var(--jp-ui-font-size0);
}
/* JupyterLab hides a cell's toolbar that would overlap the code. Then only the picker is shown, above the code. While
   JupyterLab measures the overlap, it removes the class \`jp-toolbar-overlap\`, so these rules do not apply. */
.jp-toolbar-overlap .jp-InputArea:has(> .jp-cell-toolbar > .rb-settled:not(.lm-mod-hidden)) {
  padding-top: 28px;
}
.jp-toolbar-overlap .jp-cell-toolbar:has(> .rb-settled:not(.lm-mod-hidden)) {
  display: flex;
  top: 0;
}
.jp-toolbar-overlap .jp-cell-toolbar > :not(.rb-picker) {
  display: none;
}
.rb-over {
  outline: 2px dashed var(--jp-brand-color1);
  outline-offset: -2px;
}
.rb-tab {
  overflow: auto;
  padding: 8px;
  background: var(--jp-layout-color1);
}
`,""]),r.d(t,{},{A:o})},22(e){e.exports=function(e){var t=[];return t.toString=function(){return this.map(function(t){var r="",n=void 0!==t[5];return t[4]&&(r+="@supports (".concat(t[4],") {")),t[2]&&(r+="@media ".concat(t[2]," {")),n&&(r+="@layer".concat(t[5].length>0?" ".concat(t[5]):""," {")),r+=e(t),n&&(r+="}"),t[2]&&(r+="}"),t[4]&&(r+="}"),r}).join("")},t.i=function(e,r,n,s,a){"string"==typeof e&&(e=[[null,e,void 0]]);var o={};if(n)for(var i=0;i<this.length;i++){var l=this[i][0];null!=l&&(o[l]=!0)}for(var c=0;c<e.length;c++){var d=[].concat(e[c]);n&&o[d[0]]||(void 0!==a&&(void 0===d[5]||(d[1]="@layer".concat(d[5].length>0?" ".concat(d[5]):""," {").concat(d[1],"}")),d[5]=a),r&&(d[2]&&(d[1]="@media ".concat(d[2]," {").concat(d[1],"}")),d[2]=r),s&&(d[4]?(d[1]="@supports (".concat(d[4],") {").concat(d[1],"}"),d[4]=s):d[4]="".concat(s)),t.push(d))}},t}},21(e){e.exports=function(e){return e[1]}},13(e,t,r){r.r(t);var n=r(14),s=r.n(n),a=r(15),o=r.n(a),i=r(16),l=r.n(i),c=r(17),d=r.n(c),h=r(18),u=r.n(h),p=r(19),b=r.n(p),m=r(20),g={};g.styleTagTransform=b(),g.setAttributes=d(),g.insert=l().bind(null,"head"),g.domAPI=o(),g.insertStyleElement=u(),s()(m.A,g);let f=m.A&&m.A.locals?m.A.locals:void 0;r.d(t,{},{default:f})},14(e){var t=[];function r(e){for(var r=-1,n=0;n<t.length;n++)if(t[n].identifier===e){r=n;break}return r}function n(e,n){for(var s={},a=[],o=0;o<e.length;o++){var i=e[o],l=n.base?i[0]+n.base:i[0],c=s[l]||0,d="".concat(l," ").concat(c);s[l]=c+1;var h=r(d),u={css:i[1],media:i[2],sourceMap:i[3],supports:i[4],layer:i[5]};if(-1!==h)t[h].references++,t[h].updater(u);else{var p=function(e,t){var r=t.domAPI(t);return r.update(e),function(t){t?(t.css!==e.css||t.media!==e.media||t.sourceMap!==e.sourceMap||t.supports!==e.supports||t.layer!==e.layer)&&r.update(e=t):r.remove()}}(u,n);n.byIndex=o,t.splice(o,0,{identifier:d,updater:p,references:1})}a.push(d)}return a}e.exports=function(e,s){var a=n(e=e||[],s=s||{});return function(e){e=e||[];for(var o=0;o<a.length;o++){var i=r(a[o]);t[i].references--}for(var l=n(e,s),c=0;c<a.length;c++){var d=r(a[c]);0===t[d].references&&(t[d].updater(),t.splice(d,1))}a=l}}},16(e){var t={};e.exports=function(e,r){var n=function(e){if(void 0===t[e]){var r=document.querySelector(e);if(window.HTMLIFrameElement&&r instanceof window.HTMLIFrameElement)try{r=r.contentDocument.head}catch(e){r=null}t[e]=r}return t[e]}(e);if(!n)throw Error("Couldn't find a style target. This probably means that the value for the 'insert' parameter is invalid.");n.appendChild(r)}},18(e){e.exports=function(e){var t=document.createElement("style");return e.setAttributes(t,e.attributes),e.insert(t,e.options),t}},17(e,t,r){e.exports=function(e){var t=r.nc;t&&e.setAttribute("nonce",t)}},15(e){e.exports=function(e){if("u"<typeof document)return{update:function(){},remove:function(){}};var t=e.insertStyleElement(e);return{update:function(r){var n,s,a;n="",r.supports&&(n+="@supports (".concat(r.supports,") {")),r.media&&(n+="@media ".concat(r.media," {")),(s=void 0!==r.layer)&&(n+="@layer".concat(r.layer.length>0?" ".concat(r.layer):""," {")),n+=r.css,s&&(n+="}"),r.media&&(n+="}"),r.supports&&(n+="}"),(a=r.sourceMap)&&"u">typeof btoa&&(n+="\n/*# sourceMappingURL=data:application/json;base64,".concat(btoa(unescape(encodeURIComponent(JSON.stringify(a))))," */")),e.styleTagTransform(n,t,e.options)},remove:function(){var e;null===(e=t).parentNode||e.parentNode.removeChild(e)}}}},19(e){e.exports=function(e,t){if(t.styleSheet)t.styleSheet.cssText=e;else{for(;t.firstChild;)t.removeChild(t.firstChild);t.appendChild(document.createTextNode(e))}}}}]);