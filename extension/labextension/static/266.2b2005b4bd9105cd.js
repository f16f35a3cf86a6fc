"use strict";(self.rspackChunkjupyter_rpcbench=self.rspackChunkjupyter_rpcbench||[]).push([[266],{23(r,o,e){var a=e(24),t=e.n(a),n=e(25),i=(e.n(n))()(t());i.push([r.id,`/* All colours are JupyterLab's own, so every theme works. A shape and a word show each state besides its colour. Classes begin
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
/* A panel of its own may be as high as its tab. */
.rbx-board:not(.rbx-dashboard) .rb-panel {
  display: flex;
  flex-direction: column;
  max-height: var(--rbx-room);
  overflow: hidden auto;
}
.rbx-board:not(.rbx-dashboard) .rb-panel > * {
  flex: none;
}
.rbx-board:not(.rbx-dashboard) .rb-panel > .rb-body {
  flex: 0 1 auto;
  min-height: 120px !important;
  max-height: none;
}
.rbx-board:not(.rbx-dashboard) .rb-logs {
  height: var(--rbx-room);
}
.rbx-board:not(.rbx-dashboard) .rb-logs > .rb-body {
  flex: 1 1 0;
  height: auto;
  resize: none;
}
/* A tab of panels. Two stand beside each other where both can be read. */
.rbx-board {
  display: grid;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr));
  grid-auto-rows: max-content; /* else a row whose box hides its overflow has no height where the tab scrolls */
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
/* A panel that loads: its frame has its size already, and is not seen. */
.rbx-loads:empty {
  display: none;
}
.rbx-loads {
  margin: 0;
  padding: 8px;
  color: var(--jp-ui-font-color2);
  font-size: var(--jp-ui-font-size1);
}
.rbx-loading > :not(.rbx-loads) {
  visibility: hidden;
}
/* Whose panels these are. */
.rbx-owner {
  grid-column: 1 / -1;
  justify-self: start;
  max-width: 100%;
  padding: 0 8px;
  border: var(--jp-border-width) solid var(--jp-border-color1);
  border-radius: 9px;
  background: var(--jp-layout-color2);
  color: var(--jp-ui-font-color1);
  font-family: inherit;
  font-size: var(--jp-ui-font-size1);
  line-height: 18px;
  text-overflow: ellipsis;
  white-space: nowrap;
  overflow: hidden;
  cursor: pointer;
}
/* The title of a tab. A narrow one shows as much of the panel's name as fits: no icon, no dots, no cross without the mouse. It has
   room for a few letters in any case, and for the cross beside them if it is the current one: a bar with too many titles scrolls. */
.lm-TabBar-tab.rbx-tab-title {
  container-type: inline-size;
  min-width: 60px;
}
.lm-TabBar-tab.rbx-tab-title.lm-mod-current {
  min-width: 84px;
}
.lm-TabBar-content:has(> .rbx-tab-title) {
  min-width: 0;
  overflow-x: auto;
  overflow-y: hidden;
  scrollbar-width: none;
}
@container (max-width: 130px) {
  .rbx-tab-title .lm-TabBar-tabIcon {
    display: none;
  }
  .rbx-tab-title .lm-TabBar-tabLabel {
    text-overflow: clip;
  }
}
@container (max-width: 70px) {
  .rbx-tab-title:not(:hover, .lm-mod-current) .lm-TabBar-tabCloseIcon {
    display: none;
  }
}
/* A tab of another notebook than the one in front. */
.rbx-other .lm-TabBar-tabLabel {
  color: var(--jp-ui-font-color2);
}
.rbx-other .lm-TabBar-tabLabel::before {
  display: inline-block;
  width: 5px;
  height: 5px;
  margin-right: 4px;
  border: 1.5px solid var(--jp-ui-font-color2);
  border-radius: 50%;
  vertical-align: 1px;
  content: '';
}
.rbx-other .lm-TabBar-tabIcon {
  opacity: 0.45;
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
.rbx-owner:focus-visible,
.rbx-note :focus-visible {
  outline: 2px solid var(--jp-brand-color1);
  outline-offset: 2px;
}
`,""]),e.d(o,{},{A:i})},25(r){r.exports=function(r){var o=[];return o.toString=function(){return this.map(function(o){var e="",a=void 0!==o[5];return o[4]&&(e+="@supports (".concat(o[4],") {")),o[2]&&(e+="@media ".concat(o[2]," {")),a&&(e+="@layer".concat(o[5].length>0?" ".concat(o[5]):""," {")),e+=r(o),a&&(e+="}"),o[2]&&(e+="}"),o[4]&&(e+="}"),e}).join("")},o.i=function(r,e,a,t,n){"string"==typeof r&&(r=[[null,r,void 0]]);var i={};if(a)for(var l=0;l<this.length;l++){var p=this[l][0];null!=p&&(i[p]=!0)}for(var s=0;s<r.length;s++){var d=[].concat(r[s]);a&&i[d[0]]||(void 0!==n&&(void 0===d[5]||(d[1]="@layer".concat(d[5].length>0?" ".concat(d[5]):""," {").concat(d[1],"}")),d[5]=n),e&&(d[2]&&(d[1]="@media ".concat(d[2]," {").concat(d[1],"}")),d[2]=e),t&&(d[4]?(d[1]="@supports (".concat(d[4],") {").concat(d[1],"}"),d[4]=t):d[4]="".concat(t)),o.push(d))}},o}},24(r){r.exports=function(r){return r[1]}},16(r,o,e){e.r(o);var a=e(17),t=e.n(a),n=e(18),i=e.n(n),l=e(19),p=e.n(l),s=e(20),d=e.n(s),b=e(21),c=e.n(b),x=e(22),u=e.n(x),f=e(23),h={};h.styleTagTransform=u(),h.setAttributes=d(),h.insert=p().bind(null,"head"),h.domAPI=i(),h.insertStyleElement=c(),t()(f.A,h);let v=f.A&&f.A.locals?f.A.locals:void 0;e.d(o,{},{default:v})},17(r){var o=[];function e(r){for(var e=-1,a=0;a<o.length;a++)if(o[a].identifier===r){e=a;break}return e}function a(r,a){for(var t={},n=[],i=0;i<r.length;i++){var l=r[i],p=a.base?l[0]+a.base:l[0],s=t[p]||0,d="".concat(p," ").concat(s);t[p]=s+1;var b=e(d),c={css:l[1],media:l[2],sourceMap:l[3],supports:l[4],layer:l[5]};if(-1!==b)o[b].references++,o[b].updater(c);else{var x=function(r,o){var e=o.domAPI(o);return e.update(r),function(o){o?(o.css!==r.css||o.media!==r.media||o.sourceMap!==r.sourceMap||o.supports!==r.supports||o.layer!==r.layer)&&e.update(r=o):e.remove()}}(c,a);a.byIndex=i,o.splice(i,0,{identifier:d,updater:x,references:1})}n.push(d)}return n}r.exports=function(r,t){var n=a(r=r||[],t=t||{});return function(r){r=r||[];for(var i=0;i<n.length;i++){var l=e(n[i]);o[l].references--}for(var p=a(r,t),s=0;s<n.length;s++){var d=e(n[s]);0===o[d].references&&(o[d].updater(),o.splice(d,1))}n=p}}},19(r){var o={};r.exports=function(r,e){var a=function(r){if(void 0===o[r]){var e=document.querySelector(r);if(window.HTMLIFrameElement&&e instanceof window.HTMLIFrameElement)try{e=e.contentDocument.head}catch(r){e=null}o[r]=e}return o[r]}(r);if(!a)throw Error("Couldn't find a style target. This probably means that the value for the 'insert' parameter is invalid.");a.appendChild(e)}},21(r){r.exports=function(r){var o=document.createElement("style");return r.setAttributes(o,r.attributes),r.insert(o,r.options),o}},20(r,o,e){r.exports=function(r){var o=e.nc;o&&r.setAttribute("nonce",o)}},18(r){r.exports=function(r){if("u"<typeof document)return{update:function(){},remove:function(){}};var o=r.insertStyleElement(r);return{update:function(e){var a,t,n;a="",e.supports&&(a+="@supports (".concat(e.supports,") {")),e.media&&(a+="@media ".concat(e.media," {")),(t=void 0!==e.layer)&&(a+="@layer".concat(e.layer.length>0?" ".concat(e.layer):""," {")),a+=e.css,t&&(a+="}"),e.media&&(a+="}"),e.supports&&(a+="}"),(n=e.sourceMap)&&"u">typeof btoa&&(a+="\n/*# sourceMappingURL=data:application/json;base64,".concat(btoa(unescape(encodeURIComponent(JSON.stringify(n))))," */")),r.styleTagTransform(a,o,r.options)},remove:function(){var r;null===(r=o).parentNode||r.parentNode.removeChild(r)}}}},22(r){r.exports=function(r,o){if(o.styleSheet)o.styleSheet.cssText=r;else{for(;o.firstChild;)o.removeChild(o.firstChild);o.appendChild(document.createTextNode(r))}}}}]);