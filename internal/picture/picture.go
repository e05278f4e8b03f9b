// SPDX-License-Identifier: Apache-2.0

// Package picture writes SVG pictures, readable on light and on dark pages.
package picture

import (
	"encoding/xml"
	"fmt"
	"io"
	"strings"
)

// Head opens a picture and fills its ground. The title is for readers without eyes, and for tooltips. Styles is CSS.
// Colours come from classes, because attributes cannot follow the reader's scheme.
func Head(w io.Writer, width, height float64, title, styles string) {
	fmt.Fprintf(w, head, width, height, Escape(title), strings.TrimSpace(styles))
}

const head = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %[1]g %[2]g" font-family="system-ui, sans-serif" font-size="13" role="img">
<title>%[3]s</title>
<style>
text { fill: #1f2328 } .dim { fill: #59636e } .ground { fill: #ffffff } .halo { stroke: #ffffff; stroke-width: 3; paint-order: stroke; stroke-linejoin: round } .b { font-weight: bold }
.grid { stroke: #d1d9e0 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .dim { fill: #9198a1 } .ground { fill: #0d1117 } .halo { stroke: #0d1117 }
.grid { stroke: #3d444d }
}
%[4]s
</style>
<rect class="ground" width="%[1]g" height="%[2]g"/>
`

// Escape makes a text safe for SVG.
func Escape(text string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(text)) // a Builder never fails
	return b.String()
}

// Widths of the characters from space to ~ in DejaVu Sans, in thousandths of the font's size. No common font without
// serifs is wider.
var (
	regular = [...]uint16{318, 401, 460, 838, 636, 950, 780, 275, 390, 390, 500, 838, 318, 361, 318, 337, 636, 636, 636, 636, 636, 636, 636, 636, 636, 636, 337, 337, 838, 838, 838, 531,
		1000, 684, 686, 698, 770, 632, 575, 775, 752, 295, 295, 656, 557, 863, 748, 787, 603, 787, 695, 635, 611, 732, 684, 989, 685, 611, 685, 390, 337, 390, 838, 500,
		500, 613, 635, 550, 635, 615, 352, 635, 634, 278, 278, 579, 278, 974, 634, 612, 635, 635, 411, 521, 392, 634, 592, 818, 592, 592, 525, 636, 337, 636, 838}
	bold = [...]uint16{348, 456, 521, 838, 696, 1002, 872, 306, 457, 457, 523, 838, 380, 415, 380, 365, 696, 696, 696, 696, 696, 696, 696, 696, 696, 696, 400, 400, 838, 838, 838, 580,
		1000, 774, 762, 734, 830, 683, 683, 821, 837, 372, 372, 775, 637, 995, 837, 850, 733, 850, 770, 720, 682, 812, 774, 1103, 771, 724, 725, 457, 365, 457, 838, 500,
		500, 675, 716, 593, 716, 678, 435, 716, 712, 343, 343, 665, 343, 1042, 712, 687, 716, 716, 493, 595, 478, 712, 652, 924, 645, 652, 582, 712, 365, 712, 838}
)

// Width returns the width of a text in a wide font, in the unit of size.
func Width(text string, size float64, heavy bool) float64 {
	sum := 0
	table := &regular
	if heavy {
		table = &bold
	}
	for _, r := range text {
		switch i := int(r) - ' '; {
		case i >= 0 && i < len(table):
			sum += int(table[i])
		case r < 0x600: // Latin, Greek, Cyrillic
			sum += 700
		default: // arrows, ellipsis, Chinese
			sum += 1000
		}
	}
	return float64(sum) / 1000 * size
}
