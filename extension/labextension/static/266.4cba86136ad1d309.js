"use strict";(self.rspackChunkrpcbench=self.rspackChunkrpcbench||[]).push([[266],{20(r,e,o){var t=o(21),a=o.n(t),n=o(22),i=(o.n(n))()(a());i.push([r.id,`/* All colours are JupyterLab's own, so every theme works. A shape and a word show each state besides its colour. */
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
`,""]),o.d(e,{},{A:i})},22(r){r.exports=function(r){var e=[];return e.toString=function(){return this.map(function(e){var o="",t=void 0!==e[5];return e[4]&&(o+="@supports (".concat(e[4],") {")),e[2]&&(o+="@media ".concat(e[2]," {")),t&&(o+="@layer".concat(e[5].length>0?" ".concat(e[5]):""," {")),o+=r(e),t&&(o+="}"),e[2]&&(o+="}"),e[4]&&(o+="}"),o}).join("")},e.i=function(r,o,t,a,n){"string"==typeof r&&(r=[[null,r,void 0]]);var i={};if(t)for(var s=0;s<this.length;s++){var l=this[s][0];null!=l&&(i[l]=!0)}for(var p=0;p<r.length;p++){var c=[].concat(r[p]);t&&i[c[0]]||(void 0!==n&&(void 0===c[5]||(c[1]="@layer".concat(c[5].length>0?" ".concat(c[5]):""," {").concat(c[1],"}")),c[5]=n),o&&(c[2]&&(c[1]="@media ".concat(c[2]," {").concat(c[1],"}")),c[2]=o),a&&(c[4]?(c[1]="@supports (".concat(c[4],") {").concat(c[1],"}"),c[4]=a):c[4]="".concat(a)),e.push(c))}},e}},21(r){r.exports=function(r){return r[1]}},13(r,e,o){o.r(e);var t=o(14),a=o.n(t),n=o(15),i=o.n(n),s=o(16),l=o.n(s),p=o(17),c=o.n(p),d=o(18),u=o.n(d),b=o(19),f=o.n(b),v=o(20),h={};h.styleTagTransform=f(),h.setAttributes=c(),h.insert=l().bind(null,"head"),h.domAPI=i(),h.insertStyleElement=u(),a()(v.A,h);let m=v.A&&v.A.locals?v.A.locals:void 0;o.d(e,{},{default:m})},14(r){var e=[];function o(r){for(var o=-1,t=0;t<e.length;t++)if(e[t].identifier===r){o=t;break}return o}function t(r,t){for(var a={},n=[],i=0;i<r.length;i++){var s=r[i],l=t.base?s[0]+t.base:s[0],p=a[l]||0,c="".concat(l," ").concat(p);a[l]=p+1;var d=o(c),u={css:s[1],media:s[2],sourceMap:s[3],supports:s[4],layer:s[5]};if(-1!==d)e[d].references++,e[d].updater(u);else{var b=function(r,e){var o=e.domAPI(e);return o.update(r),function(e){e?(e.css!==r.css||e.media!==r.media||e.sourceMap!==r.sourceMap||e.supports!==r.supports||e.layer!==r.layer)&&o.update(r=e):o.remove()}}(u,t);t.byIndex=i,e.splice(i,0,{identifier:c,updater:b,references:1})}n.push(c)}return n}r.exports=function(r,a){var n=t(r=r||[],a=a||{});return function(r){r=r||[];for(var i=0;i<n.length;i++){var s=o(n[i]);e[s].references--}for(var l=t(r,a),p=0;p<n.length;p++){var c=o(n[p]);0===e[c].references&&(e[c].updater(),e.splice(c,1))}n=l}}},16(r){var e={};r.exports=function(r,o){var t=function(r){if(void 0===e[r]){var o=document.querySelector(r);if(window.HTMLIFrameElement&&o instanceof window.HTMLIFrameElement)try{o=o.contentDocument.head}catch(r){o=null}e[r]=o}return e[r]}(r);if(!t)throw Error("Couldn't find a style target. This probably means that the value for the 'insert' parameter is invalid.");t.appendChild(o)}},18(r){r.exports=function(r){var e=document.createElement("style");return r.setAttributes(e,r.attributes),r.insert(e,r.options),e}},17(r,e,o){r.exports=function(r){var e=o.nc;e&&r.setAttribute("nonce",e)}},15(r){r.exports=function(r){if("u"<typeof document)return{update:function(){},remove:function(){}};var e=r.insertStyleElement(r);return{update:function(o){var t,a,n;t="",o.supports&&(t+="@supports (".concat(o.supports,") {")),o.media&&(t+="@media ".concat(o.media," {")),(a=void 0!==o.layer)&&(t+="@layer".concat(o.layer.length>0?" ".concat(o.layer):""," {")),t+=o.css,a&&(t+="}"),o.media&&(t+="}"),o.supports&&(t+="}"),(n=o.sourceMap)&&"u">typeof btoa&&(t+="\n/*# sourceMappingURL=data:application/json;base64,".concat(btoa(unescape(encodeURIComponent(JSON.stringify(n))))," */")),r.styleTagTransform(t,e,r.options)},remove:function(){var r;null===(r=e).parentNode||r.parentNode.removeChild(r)}}}},19(r){r.exports=function(r,e){if(e.styleSheet)e.styleSheet.cssText=r;else{for(;e.firstChild;)e.removeChild(e.firstChild);e.appendChild(document.createTextNode(r))}}}}]);