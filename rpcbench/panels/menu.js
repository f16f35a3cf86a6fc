// A button with a menu: the one way in which a panel offers controls for which there is no room.
// Guarantees
// - The menu is in the browser's top layer, so no box cuts it, and it is a child of the panel, so a table that is drawn anew below
//   its button does not close it. It closes when its button is gone.
// - Enter, Space or ArrowDown open it, arrows and Home and End move in it, Escape closes it and gives the focus back. A click
//   outside closes it, and so does one on a button in it, unless that is pressed again and again: a toggle, a zoom, "sure?".

const MENU_GAP = 4; // pixels between a button, its menu, and the edge of the page
const MENU_ITEMS = "button, select, input";
const MENU_STAYS = "[aria-pressed], [aria-disabled='true'], [data-sure], .rb-stays"; // a click on these leaves the menu open

class Menu {
  // `root`: the panel; `fill()` returns the nodes of the menu when it is first opened. With `isPlain` these are buttons, and
  // nothing else.
  constructor(root, name, fill, isPlain = false) {
    const kind = isPlain ? "menu" : "dialog";
    Object.assign(this, { root, name, fill, kind, node: null, stop: () => {} });
    const about = { "aria-label": name, title: name, "aria-haspopup": kind, "aria-expanded": false };
    this.opener = html("button", { type: "button", class: "rb-tool rb-menu-button", ...about }, "⋯");
    this.opener.addEventListener("click", () => (this.isOpen ? this.close() : this.open()));
    this.opener.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowDown") return;
      event.preventDefault();
      this.open();
    });
  }

  get isOpen() {
    return this.opener.getAttribute("aria-expanded") === "true";
  }

  // Returns the menu's own element, which it makes when it is first needed.
  make() {
    if (this.node) return this.node;
    this.node = html("div", { class: "rb-menu", role: this.kind, "aria-label": this.name, popover: "manual", hidden: "" });
    this.node.append(...this.fill());
    if (this.kind === "menu") for (const item of this.node.children) set(item, { role: "menuitem" });
    this.node.addEventListener("keydown", (event) => this.onKey(event));
    this.node.addEventListener("click", ({ target }) => {
      const button = target.closest("button");
      if (button && !button.matches(MENU_STAYS)) this.close();
    });
    this.node.addEventListener("focusout", ({ relatedTarget: to }) => {
      if (to && !this.node.contains(to) && to !== this.opener) this.close(false);
    });
    this.root.append(this.node);
    return this.node;
  }

  items() {
    return [...this.node.querySelectorAll(MENU_ITEMS)].filter((node) => !node.disabled && node.getClientRects().length);
  }

  open() {
    if (this.isOpen) return;
    this.make().hidden = false;
    this.node.showPopover?.();
    set(this.opener, { "aria-expanded": true });
    const outside = ({ target }) => !this.node.contains(target) && !this.opener.contains(target) && this.close(false);
    const move = () => this.place();
    document.addEventListener("pointerdown", outside, true);
    window.addEventListener("scroll", move, true);
    window.addEventListener("resize", move);
    this.stop = () => {
      document.removeEventListener("pointerdown", outside, true);
      window.removeEventListener("scroll", move, true);
      window.removeEventListener("resize", move);
    };
    this.place();
    this.items()[0]?.focus({ preventScroll: true });
  }

  close(givesFocus = true) {
    if (!this.isOpen) return;
    this.stop();
    set(this.opener, { "aria-expanded": false });
    const had = this.node.contains(document.activeElement);
    if (givesFocus && had && this.opener.isConnected) this.opener.focus({ preventScroll: true });
    this.node.hidden = true; // which closes a popover, too
    if (this.node.isConnected) this.node.hidePopover?.();
  }

  remove() {
    this.close(false);
    this.node?.remove();
  }

  // Puts the menu below its button, or above it where there is more room, within the page. A menu whose button has gone closes.
  place() {
    if (!this.isOpen) return;
    const at = this.opener.getBoundingClientRect();
    if (!at.width) return this.close(false);
    set(this.node, { style: null }); // its own height counts
    const { width, height } = this.node.getBoundingClientRect();
    const [wide, tall] = [document.documentElement.clientWidth, window.innerHeight];
    const left = Math.max(MENU_GAP, Math.min(at.right - width, wide - width - MENU_GAP));
    const [below, above] = [at.bottom + MENU_GAP, at.top - height - MENU_GAP];
    const top = below + height > tall && at.top > tall - at.bottom ? Math.max(MENU_GAP, above) : below;
    set(this.node, { style: `left: ${left}px; top: ${top}px; max-height: ${tall - top - MENU_GAP}px` });
  }

  onKey(event) {
    const { key, ctrlKey, metaKey, altKey } = event;
    const items = this.items();
    const at = items.indexOf(document.activeElement);
    const isTyped = document.activeElement?.matches("input[type=search]");
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, ...(isTyped ? {} : { Home: 0, End: -1 }) }[key];
    if (ctrlKey || metaKey || altKey || (key !== "Escape" && to === undefined)) return;
    event.preventDefault();
    event.stopPropagation(); // it is not the notebook's, which would leave its cell
    if (key === "Escape") this.close();
    else items.at(to % items.length)?.focus();
  }
}
