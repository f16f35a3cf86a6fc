"use strict";(self.rspackChunkrpcbench=self.rspackChunkrpcbench||[]).push([[760],{2(e,t,r){r.r(t),r.d(t,{default:()=>G});var n=r(3),a=r(4),s=r(5),o=r(6),i=r(7);let l=["restarting","autorestarting","terminating","dead"];class c{constructor(e,t){this._kernel=e,this._ears=t,this._comm=e.createComm("rpcbench"),this._comm.onMsg=e=>t.onMessage?.(e.content.data),this._comm.onClose=e=>this._end(e.content.data),e.statusChanged.connect(this._onStatus,this)}get id(){return this._comm.commId}async open(e){await this._kernel.info,this._kernel.supportsSubshells&&"subshellStarted"in this._comm&&await this._comm.subshellStarted,this._over||this._comm.open(e)}close(){this._finish(),this._comm.isDisposed||this._kernel.isDisposed||this._comm.close()}_onStatus(e,t){l.includes(t)&&this._end({error:"the kernel has gone"})}_end(e){this._over||(this._finish(),this._ears.onEnd(e))}_finish(){this._over=!0,this._kernel.statusChanged.disconnect(this._onStatus,this)}_kernel;_ears;_comm;_over=!1}async function d(e,t){return new Promise((r,n)=>{new c(e,{onEnd:e=>r(e)}).open({...t}).catch(n)})}let h="%load_ext rpcbench";class u{constructor(e){this._context=e,e.kernelChanged.connect(this._begin,this),e.statusChanged.connect(this._onStatus,this),this._stay=window.setInterval(()=>void this._renew(),3e4),this._begin()}changed=new i.Signal(this);get phase(){return this._phase}get state(){return this._state}get notice(){return this._notice}get kernel(){return this._context.session?.kernel??null}get isDisposed(){return this._isDisposed}dispose(){this._isDisposed=!0,window.clearInterval(this._stay),this._drop(),i.Signal.clearData(this)}say(e,t=!1){this._notice=e?{text:e,bad:t}:null,this.changed.emit()}async perform(e){if(this.say(""),"absent"===this._phase&&!await this._load())return;let{kernel:t}=this;if(t){let r=await d(t,e).catch(e=>({error:String(e)}));this.say(r.error??r.text??"rpcbench is not loaded in this kernel any more.",!r.text)}}lookAgain(){"absent"===this._phase&&this._find()}_begin(){this._drop(),this._become(this.kernel?"unknown":"none"),this._find()}_onStatus(e,t){"restarting"===t||"autorestarting"===t?(this._drop(),this._become("unknown")):"unknown"!==this._phase||this._finding||this._find()}async _find(){this._finding=!0,await this._ask().finally(()=>this._finding=!1)}async _ask(){let{kernel:e}=this,t=this._turn;if(!e||"python"!==(await e.info).language_info.name)return this._become("none",t);let r=await e.requestExecute({code:"",silent:!0,store_history:!1,user_expressions:{here:"'rpcbench' in get_ipython().extension_manager.loaded"}}).done.catch(()=>null);if(!r||t!==this._turn||"here"===this._phase)return;let n=r.content,a="ok"===n.status&&JSON.stringify(n.user_expressions).includes('"True"');await (a?this._watch():this._become("absent",t))}async _load(){let{kernel:e}=this,t=this._turn;this._become("loading");let r=await e?.requestExecute({code:h,silent:!0,store_history:!1}).done;if(t!==this._turn||!r)return!1;if("ok"!==r.content.status){let e="error"===r.content.status?r.content.evalue:"it was interrupted";return this._become("absent"),this.say(`${h} failed in this notebook's kernel: ${e}`,!0),!1}return await this._watch(),!0}async _watch(){let{kernel:e}=this;if(!e)return;this._drop();let t=this._turn;this._line=new c(e,{onMessage:e=>this._see(e),onEnd:()=>{this._drop(),this._become("absent")}}),this._become("here",t),await this._line.open({do:"watch"})}_see(e){void 0!==e.problem?this.say(e.problem,!0):2===e.speaks?(this._state=e,this.changed.emit()):this.say("The rpcbench of this kernel and the one of this page are of different versions: install the same.",!0)}async _renew(){let{kernel:e,_line:t}=this;e&&t&&!1===(await d(e,{do:"stay",watch:t.id})).there&&t===this._line&&await this._watch()}_drop(){this._turn+=1,this._line?.close(),this._line=null,this._state=null}_become(e,t=this._turn){t!==this._turn||this._isDisposed||(this._phase=e,this.changed.emit())}_context;_stay;_phase="none";_state=null;_notice=null;_line=null;_turn=0;_finding=!1;_isDisposed=!1}class p{constructor(e){this._tracker=e,e.currentChanged.connect(this._onCurrent,this),s.NotebookActions.executed.connect((t,{notebook:r,cell:n})=>{let a=e.find(e=>e.content===r);a&&n.model.sharedModel.source.includes("rpcbench")&&this.of(a).lookAgain()}),this._onCurrent()}changed=new i.Signal(this);get notebook(){return this._tracker.currentWidget}get current(){return this.notebook&&this.of(this.notebook)}of(e){let t=this._known.get(e);if(t)return t;let r=new u(e.sessionContext);return this._known.set(e,r),r.changed.connect(()=>r===this.current&&this.changed.emit()),e.disposed.connect(()=>r.dispose()),r}ofCell(e){let t=this._tracker.find(t=>t.content.widgets.includes(e));return t?this.of(t):null}_onCurrent(){this.changed.emit()}_tracker;_known=new WeakMap}function b(e){return e?.clusters.find(e=>e.current)}function m(e){return`${e} worker${1===e?"":"s"}`}let f=/^(\s*)%%remote(?![^\s])([^\n]*)(\n|$)/,g=/(?:"[^"]*"|'[^']*'|[^\s"'])+/g,_=new Set(["-i","-o","--rref","--timeout"]);function w(e){let t=[],r=[],n=!1;for(let a of e.match(g)??[])(n||a.startsWith("-")?r:t).push(a),n=!n&&_.has(a);return{targets:t,options:r}}function v(e,t){if(e?.model.type!=="code")return!1;let r=e.model.sharedModel,n=function(e,t){let r=f.exec(e);if(!r)return null===t?null:{start:0,end:0,text:`%%remote ${t}
`};let n=r[1]?.length??0;if(null===t)return{start:n,end:r[0].length,text:""};let{targets:a,options:s}=w(r[2]??""),o=r[0].length-(r[3]?.length??0);return a.join(" ")===t?null:{start:n,end:o,text:["%%remote",t,...s].join(" ")}}(r.source,t);return n&&r.updateSource(n.start,n.end,n.text),!0}var k=r(8),y=r(9),x=r(10);let E=`<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16" viewBox="0 0 24 24">
  <g class="jp-icon3" fill="#616161">
    <rect x="2" y="14" width="20" height="2.4" rx="1"/>
    <rect x="4.5" y="16" width="2.4" height="6" rx="1"/>
    <rect x="17.1" y="16" width="2.4" height="6" rx="1"/>
    <rect x="4" y="6" width="6.5" height="6.5" rx="1.4"/>
    <circle cx="16.8" cy="9.2" r="3.4"/>
  </g>
</svg>`,C=`<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">
  <path class="jp-icon3" fill="#616161" d="M19 13H5v-2h14z"/>
</svg>`,j=new x.LabIcon({name:"rpcbench:fewer",svgstr:C}),S=new x.LabIcon({name:"rpcbench:bench",svgstr:E});async function N(e,t,r,n){if(!r.kernel)return;let s=null,o=new c(r.kernel,{onMessage:r=>{var i,l,c,d,h;let u,p,b;s??=(i=e,l=t,c=n,d=r.bundle,h=()=>o.close(),u=new k.OutputAreaModel({trusted:!0}),p=new k.SimplifiedOutputArea({model:u,rendermime:l.content.rendermime}),(b=new a.MainAreaWidget({content:p})).id=`rpcbench-panel-${y.UUID.uuid4()}`,b.addClass("rb-tab"),b.toolbar.hide(),b.title.label=`${c}: ${l.title.label}`,b.title.caption=`The panel ${c} of ${l.context.path}`,b.title.icon=S,b.title.closable=!0,b.disposed.connect(h),u.add({output_type:"display_data",data:d,metadata:{}}),"JupyterLab"===i.name?i.shell.add(b,"main",{mode:"split-right",ref:l.id}):(i.shell.add(b,"down"),i.shell.activateById(b.id)),b)},onEnd:e=>{s?.dispose(),"string"==typeof e.error&&r.say(e.error,!0)}});t.disposed.connect(()=>s?.dispose()),await o.open({do:"panel",name:n})}class I{constructor(e,t){this._app=e,this._benches=t}async start(e){let t=e??await this._number("Start workers",2);t&&await this._benches.current?.perform({do:"start",size:t})}async scale(e=this._cluster,t){let r=e&&(t??await this._number("How many workers shall there be?",e.workers.length));e&&r&&await this._mayShrink(e,r)&&await this._act(e,"scale",String(r))}async restart(e=this._cluster,t){let r=t??(e&&await this._worker(e,"Restart a worker"));if(!e||!r)return;let n=`${r.name} still serves. What it holds is lost.`;("lost"===r.state||await $(`Restart ${r.name}?`,n,"Restart"))&&await this._act(e,"restart",r.name)}async interrupt(e=this._cluster,t="all"){e&&await this._act(e,"interrupt",t)}async stop(e=this._cluster){e&&await $(`Stop ${m(e.workers.length)}?`,"What its workers hold is lost.","Stop")&&await this._act(e,"stop","all")}async use(e){await this._benches.current?.perform({do:"use",of:e.name})}async openPanel(e){let{current:t,notebook:r}=this._benches,n=e??await A("Open a panel",t?.state?.panels??[]);t&&r&&n&&await N(this._app,r,t,n)}async aim(e){let{current:t,notebook:r}=this._benches,n=this._cluster?.workers.map(e=>e.name)??[],a=e??await A("Run this cell on",["notebook",...n,"all"]);a&&!v(r?.content.activeCell,"notebook"===a?null:a)&&t?.say("Choose a code cell first: a target is for code.",!0)}async _act(e,t,r){await this._benches.current?.perform({do:"act",of:e.name,action:t,target:r})}get _cluster(){return b(this._benches.current?.state??null)}async _number(e,t){let r=await a.InputDialog.getNumber({title:e,value:t,label:"Workers"});return r.button.accept&&r.value&&r.value>=1?Math.floor(r.value):null}async _worker(e,t){let r=await A(t,e.workers.map(e=>e.name));return e.workers.find(e=>e.name===r)}async _mayShrink(e,t){let r=e.workers.length-t;return r<=0||$(`End ${m(r)}?`,"What they hold is lost.","End")}_app;_benches}async function $(e,t,r){let n=[a.Dialog.cancelButton(),a.Dialog.warnButton({label:r})];return(await (0,a.showDialog)({title:e,body:t,buttons:n})).button.accept}async function A(e,t){let r=t.length?await a.InputDialog.getItem({title:e,items:t,label:e}):null;return r?.button.accept?r.value:null}let D="application/x-rpcbench-worker",M="rb-over";function W(e){let t=t=>{e.node.querySelectorAll(`.${M}`).forEach(e=>e!==t&&e.classList.remove(M)),t?.classList.add(M)},r=t=>{let r,n=t.dataTransfer?.types.includes(D)?(r=t.target,e.content.widgets.find(e=>"code"===e.model.type&&r instanceof Node&&e.node.contains(r))):void 0;return n&&(t.preventDefault(),t.stopPropagation()),n};e.node.addEventListener("dragover",e=>t(r(e)?.node),!0),e.node.addEventListener("dragleave",()=>t(),!0),e.node.addEventListener("drop",e=>{v(r(e),e.dataTransfer?.getData(D)||null),t()},!0)}var T=r(11);class z extends T.Widget{constructor(e,t){super({node:document.createElement("div")}),this.addClass("rb-picker"),this._cell=e,this._benches=t,this._select.title="Where this cell runs: its first line, %%remote. Options on that line stay when the target changes; 'notebook' takes the line away (undo brings it back).",this._select.setAttribute("aria-label","Runs on"),this._select.dataset.lmSuppressShortcuts="true",this._select.addEventListener("change",()=>v(e,this._select.value||null)),this.node.append(this._select),e.model.contentChanged.connect(this._draw,this),this._draw()}dispose(){this.isDisposed||(this._bench?.changed.disconnect(this._draw,this),this._cell.model?.contentChanged.disconnect(this._draw,this),super.dispose())}onAfterAttach(){requestIdleCallback(()=>requestIdleCallback(()=>this.addClass("rb-settled")))}_draw(){var e;let t;if(this.isDisposed||this._cell.isDisposed)return;this._follow();let r=(e=this._cell.model.sharedModel.source,(t=f.exec(e))?w(t[2]??"").targets.join(" "):null),n=this._options(r),a=JSON.stringify(n);a!==this._drawn&&(this._drawn=a,this._select.replaceChildren(...n.map(([e,t])=>new Option(t,e)))),this._select.value=r??"",this.setHidden(null===r&&this._bench?.phase!=="here")}_options(e){let t=this._bench?.state?.auto,r=b(this._bench?.state??null)?.workers??[],n=[["",t?`${t} (%autoremote)`:"notebook"],...r.map(({name:e,state:t})=>[e,"lost"===t?`${e} (lost)`:e])];return r.length>1&&n.push(["all","all"]),null===e||n.some(([t])=>t===e)||n.push([e,e||"(nobody yet)"]),n}_follow(){let e=this._benches.ofCell(this._cell);e!==this._bench&&(this._bench?.changed.disconnect(this._draw,this),e?.changed.connect(this._draw,this),this._bench=e)}_cell;_benches;_select=document.createElement("select");_bench=null;_drawn=""}var L=r(12),R=r.n(L);function O({icon:e,label:t,disabled:r=!1,flip:n=!1,onClick:a}){let s=`rb-icon${n?" rb-flip":""}`;return R().createElement("button",{className:s,title:t,"aria-label":t,"aria-disabled":r,onClick:()=>!r&&a()},R().createElement(e.react,{tag:"span",elementSize:"small"}))}function P({worker:e,cluster:t,disabled:r,deeds:n}){let{name:a,state:s}=e,o="lost"===s;return R().createElement("li",{className:`rb-worker rb-${s}`,"data-worker":a,draggable:t.current&&!o,onDragStart:e=>{var t;return t=e.dataTransfer,void(t.setData(D,a),t.setData("text/plain",`%%remote ${a}
`),t.effectAllowed="copy")},title:t.current&&!o?`Drag ${a} to a cell to run that there`:void 0},R().createElement(q,{state:s}),R().createElement("span",{className:"rb-name"},a),R().createElement("span",{className:"rb-about"},function({state:e,note:t,start:r,cpu:n}){let a=r>1?[`start ${r}`]:[],s=n>0?[`${n} %`]:[];return(t?[`lost: ${t}`]:[e,...s,...a]).join(" \xb7 ")}(e)),R().createElement("span",{className:"rb-space"}),t.current&&!o&&R().createElement(O,{icon:x.undoIcon,label:`Let the active cell run on ${a}`,onClick:()=>void n.aim(a),flip:!0}),!o&&R().createElement(O,{icon:x.stopIcon,label:`Interrupt ${a}`,onClick:()=>void n.interrupt(t,a)}),R().createElement(O,{icon:x.refreshIcon,label:o?`Start ${a} again`:`Restart ${a}`,disabled:r,onClick:()=>void n.restart(t,e)}))}let B={ready:R().createElement("circle",{cx:"6",cy:"6",r:"4.5"}),busy:R().createElement("path",{d:"M2 1.5 10.5 6 2 10.5Z"}),starting:R().createElement("circle",{cx:"6",cy:"6",r:"4",className:"rb-hollow"}),stopped:R().createElement("path",{d:"M2 1.5h3v9H2zM7 1.5h3v9H7z"}),lost:R().createElement("path",{d:"M2 2 10 10M10 2 2 10",className:"rb-hollow"})};function q({state:e}){return R().createElement("svg",{className:"rb-mark",viewBox:"0 0 12 12",width:"12",height:"12","aria-hidden":"true"},B[e])}function H({cluster:e,several:t,disabled:r,deeds:n}){let{name:a,kind:s,workers:o}=e,i=[m(o.length),..."process"===s?[]:[s]].join(", ");return R().createElement("section",{className:"rb-cluster","aria-label":`Cluster ${a}`},R().createElement("header",null,R().createElement("h3",null,a),R().createElement("span",{className:"rb-about"},i),t&&e.current&&R().createElement("span",{className:"rb-about"},"current"),t&&!e.current&&R().createElement("button",{className:"rb-button",disabled:r,onClick:()=>void n.use(e)},"use"),R().createElement("span",{className:"rb-space"}),R().createElement(O,{icon:j,label:`One worker less for ${a}`,disabled:r||o.length<2,onClick:()=>void n.scale(e,o.length-1)}),R().createElement(O,{icon:x.addIcon,label:`One more worker for ${a}`,disabled:r,onClick:()=>void n.scale(e,o.length+1)}),R().createElement(O,{icon:x.closeIcon,label:`Stop ${a}`,disabled:r,onClick:()=>void n.stop(e)})),R().createElement("ul",null,o.map(t=>R().createElement(P,{key:t.name,worker:t,cluster:e,disabled:r,deeds:n}))))}function F({loads:e,disabled:t,deeds:r}){let[n,a]=(0,L.useState)(2),s=Number.isInteger(n)&&n>=1;return R().createElement("form",{className:"rb-start",onSubmit:e=>{e.preventDefault(),r.start(n)}},R().createElement("label",null,"Workers"," ",R().createElement("input",{type:"number",min:1,step:1,value:Number.isNaN(n)?"":n,onChange:e=>a(e.target.valueAsNumber)})),R().createElement("button",{type:"submit",className:"rb-button rb-first",disabled:t||!s},"Start ",s&&m(n)),R().createElement("p",{className:"rb-hint"},e&&R().createElement(R().Fragment,null,"Runs ",R().createElement("code",null,"%load_ext rpcbench")," in this notebook's kernel first."," "),"The same as ",R().createElement("code",null,"%cluster start ",s?n:2),"."))}class J extends x.ReactWidget{constructor(e,t){super(),this.id="rpcbench-sidebar",this.addClass("rb-sidebar"),this.title.icon=S,this.title.caption="rpcbench: workers",this.node.setAttribute("role","region"),this.node.setAttribute("aria-label","rpcbench: workers"),this._benches=e,this._deeds=t,e.changed.connect(()=>this.update())}render(){let e=this._benches.current,t=this._benches.notebook?.title.label;return R().createElement(R().Fragment,null,R().createElement("header",{className:"rb-head"},R().createElement("h2",null,"Workers"),t&&R().createElement("span",{className:"rb-of"},t)),e?this._body(e):R().createElement("p",{className:"rb-hint"},"Open a notebook to start workers for it."),R().createElement(X,{bench:e}))}_body(e){switch(e.phase){case"none":return R().createElement("p",{className:"rb-hint"},"This notebook has no Python kernel.");case"unknown":return R().createElement("p",{className:"rb-hint"},"Waiting for the kernel…");case"loading":return R().createElement("p",{className:"rb-hint"},"Running %load_ext rpcbench in the kernel, once the cell that runs has ended…");case"absent":return R().createElement(F,{loads:!0,disabled:!1,deeds:this._deeds});case"here":return this._clusters(e)}}_clusters(e){let{state:t}=e;if(!t)return R().createElement("p",{className:"rb-hint"},"Waiting for the kernel…");let r=t.doing.length>0,n=t.clusters.length>1;return R().createElement(R().Fragment,null,t.clusters.map(e=>R().createElement(H,{key:e.name,cluster:e,several:n,disabled:r,deeds:this._deeds})),0===t.clusters.length&&R().createElement(F,{loads:!1,disabled:r,deeds:this._deeds}),t.clusters.length>0&&t.panels.length>0&&R().createElement(U,{names:t.panels,deeds:this._deeds}))}_benches;_deeds}function U({names:e,deeds:t}){return R().createElement("section",{className:"rb-panels","aria-label":"Panels"},R().createElement("h3",null,"Panels"),R().createElement("div",null,e.map(e=>R().createElement("button",{key:e,className:"rb-button",onClick:()=>void t.openPanel(e),title:`Open the panel ${e} in a tab`},e))))}function X({bench:e}){let t=e?.state?.doing??[],r=e?.notice;return R().createElement("div",{className:"rb-news"},R().createElement("div",{role:"status",className:"rb-doing"},t.join("\n"),!r?.bad&&r?.text),R().createElement("div",{role:"alert",className:"rb-bad"},r?.bad&&r.text))}class Z extends x.ReactWidget{constructor(e,t){super(),this.addClass("rb-status"),this._benches=e,this._activate=t,e.changed.connect(this._onChanged,this),this._onChanged()}get isShown(){return this._benches.current?.phase==="here"}_onChanged(){this.update()}render(){return R().createElement("button",{className:"rb-status-button",onClick:this._activate,title:"Show the workers in the sidebar"},this._words())}_words(){let e=this._benches.current?.state,t=e?.clusters.flatMap(e=>e.workers)??[],r=t.filter(e=>"lost"===e.state).length;return e?.doing[0]??`rpcbench: ${t.length?m(t.length):"no workers"}${r?`, ${r} lost`:""}`}_benches;_activate}r(13);let G={id:"rpcbench:plugin",description:"Workers in a sidebar, a target for each cell, panels as tabs.",autoStart:!0,requires:[s.INotebookTracker],optional:[a.ICommandPalette,a.IToolbarWidgetRegistry,o.IStatusBar,n.ILayoutRestorer,n.ILabShell],activate:(e,t,r,n,a,s,o)=>{var i;let l,c,d=new p(t),h=new I(e,d),u=new J(d,h);if(e.shell.add(u,o?"left":"right",{rank:600}),s?.add(u,u.id),l=()=>void 0!==b(d.current?.state??null),(c=(t,n,a,s)=>{e.commands.addCommand(`rpcbench:${t}`,{label:n,isEnabled:a,execute:s}),r?.addItem({command:`rpcbench:${t}`,category:"rpcbench"})})("start","Start Workers…",()=>null!==d.current&&["absent","here"].includes(d.current.phase),({size:e})=>h.start(e)),c("scale","Change the Number of Workers…",l,({size:e})=>h.scale(void 0,e)),c("restart","Restart a Worker…",l,()=>h.restart()),c("interrupt","Interrupt All Workers",l,()=>h.interrupt()),c("stop","Stop All Workers…",l,()=>h.stop()),c("panel","Open a Panel…",l,({name:e})=>h.openPanel(e)),c("target","Run This Cell on…",l,({target:e})=>h.aim(e)),c("sidebar","Show the Sidebar",()=>!0,async()=>e.shell.activateById("rpcbench-sidebar")),d.changed.connect(()=>e.commands.notifyCommandChanged()),n?.addFactory("Cell","rpcbench-target",e=>new z(e,d)),t.widgetAdded.connect((e,t)=>W(t)),t.forEach(W),i=t=>e.shell.activateById(t),document.addEventListener("rpcbench:reveal",e=>{let r=e.detail?.cell,n=e=>e.model.id===r,a=t.find(e=>e.content.widgets.some(n));if(!a)return;e.preventDefault();let{content:s}=a,o=s.widgets.findIndex(n);i(a.id),s.activeCellIndex=o,s.deselectAll(),s.scrollToItem(o,"center").then(()=>{s.widgets[o]?.node.animate([{backgroundColor:"rgb(230 159 0 / 35%)"},{}],1500)})}),a){let t=new Z(d,()=>e.shell.activateById(u.id));a.registerStatusItem("rpcbench:workers",{item:t,align:"left",rank:5,isActive:()=>t.isShown,activeStateChanged:d.changed})}}}},20(e,t,r){var n=r(21),a=r.n(n),s=r(22),o=(r.n(s))()(a());o.push([e.id,`/* All colours are JupyterLab's own, so both themes and any other hold. State is told by shape and word as well. */
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
/* JupyterLab hides a toolbar that would lie on the code. The picker then stands alone, above the code. While it looks
   whether that is so, it takes the class away, and these rules with it. */
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
`,""]),r.d(t,{},{A:o})},22(e){e.exports=function(e){var t=[];return t.toString=function(){return this.map(function(t){var r="",n=void 0!==t[5];return t[4]&&(r+="@supports (".concat(t[4],") {")),t[2]&&(r+="@media ".concat(t[2]," {")),n&&(r+="@layer".concat(t[5].length>0?" ".concat(t[5]):""," {")),r+=e(t),n&&(r+="}"),t[2]&&(r+="}"),t[4]&&(r+="}"),r}).join("")},t.i=function(e,r,n,a,s){"string"==typeof e&&(e=[[null,e,void 0]]);var o={};if(n)for(var i=0;i<this.length;i++){var l=this[i][0];null!=l&&(o[l]=!0)}for(var c=0;c<e.length;c++){var d=[].concat(e[c]);n&&o[d[0]]||(void 0!==s&&(void 0===d[5]||(d[1]="@layer".concat(d[5].length>0?" ".concat(d[5]):""," {").concat(d[1],"}")),d[5]=s),r&&(d[2]&&(d[1]="@media ".concat(d[2]," {").concat(d[1],"}")),d[2]=r),a&&(d[4]?(d[1]="@supports (".concat(d[4],") {").concat(d[1],"}"),d[4]=a):d[4]="".concat(a)),t.push(d))}},t}},21(e){e.exports=function(e){return e[1]}},13(e,t,r){r.r(t);var n=r(14),a=r.n(n),s=r(15),o=r.n(s),i=r(16),l=r.n(i),c=r(17),d=r.n(c),h=r(18),u=r.n(h),p=r(19),b=r.n(p),m=r(20),f={};f.styleTagTransform=b(),f.setAttributes=d(),f.insert=l().bind(null,"head"),f.domAPI=o(),f.insertStyleElement=u(),a()(m.A,f);let g=m.A&&m.A.locals?m.A.locals:void 0;r.d(t,{},{default:g})},14(e){var t=[];function r(e){for(var r=-1,n=0;n<t.length;n++)if(t[n].identifier===e){r=n;break}return r}function n(e,n){for(var a={},s=[],o=0;o<e.length;o++){var i=e[o],l=n.base?i[0]+n.base:i[0],c=a[l]||0,d="".concat(l," ").concat(c);a[l]=c+1;var h=r(d),u={css:i[1],media:i[2],sourceMap:i[3],supports:i[4],layer:i[5]};if(-1!==h)t[h].references++,t[h].updater(u);else{var p=function(e,t){var r=t.domAPI(t);return r.update(e),function(t){t?(t.css!==e.css||t.media!==e.media||t.sourceMap!==e.sourceMap||t.supports!==e.supports||t.layer!==e.layer)&&r.update(e=t):r.remove()}}(u,n);n.byIndex=o,t.splice(o,0,{identifier:d,updater:p,references:1})}s.push(d)}return s}e.exports=function(e,a){var s=n(e=e||[],a=a||{});return function(e){e=e||[];for(var o=0;o<s.length;o++){var i=r(s[o]);t[i].references--}for(var l=n(e,a),c=0;c<s.length;c++){var d=r(s[c]);0===t[d].references&&(t[d].updater(),t.splice(d,1))}s=l}}},16(e){var t={};e.exports=function(e,r){var n=function(e){if(void 0===t[e]){var r=document.querySelector(e);if(window.HTMLIFrameElement&&r instanceof window.HTMLIFrameElement)try{r=r.contentDocument.head}catch(e){r=null}t[e]=r}return t[e]}(e);if(!n)throw Error("Couldn't find a style target. This probably means that the value for the 'insert' parameter is invalid.");n.appendChild(r)}},18(e){e.exports=function(e){var t=document.createElement("style");return e.setAttributes(t,e.attributes),e.insert(t,e.options),t}},17(e,t,r){e.exports=function(e){var t=r.nc;t&&e.setAttribute("nonce",t)}},15(e){e.exports=function(e){if("u"<typeof document)return{update:function(){},remove:function(){}};var t=e.insertStyleElement(e);return{update:function(r){var n,a,s;n="",r.supports&&(n+="@supports (".concat(r.supports,") {")),r.media&&(n+="@media ".concat(r.media," {")),(a=void 0!==r.layer)&&(n+="@layer".concat(r.layer.length>0?" ".concat(r.layer):""," {")),n+=r.css,a&&(n+="}"),r.media&&(n+="}"),r.supports&&(n+="}"),(s=r.sourceMap)&&"u">typeof btoa&&(n+="\n/*# sourceMappingURL=data:application/json;base64,".concat(btoa(unescape(encodeURIComponent(JSON.stringify(s))))," */")),e.styleTagTransform(n,t,e.options)},remove:function(){var e;null===(e=t).parentNode||e.parentNode.removeChild(e)}}}},19(e){e.exports=function(e,t){if(t.styleSheet)t.styleSheet.cssText=e;else{for(;t.firstChild;)t.removeChild(t.firstChild);t.appendChild(document.createTextNode(e))}}}}]);