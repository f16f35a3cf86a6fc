// The icons that JupyterLab lacks: rpcbench's own, a bench with two workers on it, for the sidebar and the tabs, and a minus.
// The class `jp-icon3` gives them the colour of the theme.

import { LabIcon } from '@jupyterlab/ui-components';

const BENCH = `<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16" viewBox="0 0 24 24">
  <g class="jp-icon3" fill="#616161">
    <rect x="2" y="14" width="20" height="2.4" rx="1"/>
    <rect x="4.5" y="16" width="2.4" height="6" rx="1"/>
    <rect x="17.1" y="16" width="2.4" height="6" rx="1"/>
    <rect x="4" y="6" width="6.5" height="6.5" rx="1.4"/>
    <circle cx="16.8" cy="9.2" r="3.4"/>
  </g>
</svg>`;

const MINUS = `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">
  <path class="jp-icon3" fill="#616161" d="M19 13H5v-2h14z"/>
</svg>`;

export const fewerIcon = new LabIcon({ name: 'rpcbench:fewer', svgstr: MINUS });
export const rpcbenchIcon = new LabIcon({ name: 'rpcbench:bench', svgstr: BENCH });
