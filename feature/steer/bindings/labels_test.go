// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/steer/engine"
)

// TestNamesOfBindings: names that a terminal, a scrape or JSON cannot show are rejected.
func TestNamesOfBindings(t *testing.T) {
	for name, good := range map[string]bool{
		"www": true, "web app": true, "Zürich": true, `a\x2db`: true, "-x": true, strings.Repeat("x", engine.MaxLabel): true,
		"": false, "\xff": false, "a\nb": false, "\x1b[31mred": false, "a\tb": false, "\u202ea": false, "a\u200b": false, "\u009b": false, "x\x7f": false,
		" a": false, "a ": false, "\u00a0": false, "a\x00b": false, strings.Repeat("x", engine.MaxLabel+1): false,
	} {
		if err := checkLabel(name); (err == nil) != good || err != nil && !errors.Is(err, engine.ErrLabel) {
			t.Errorf("%q: %v", name, err)
		}
		quoted, err := json.Marshal(name)
		if err != nil {
			t.Fatal(err)
		}
		if name == "\xff" {
			continue // JSON cannot express it
		}
		_, err = parseBindings("b.json", fmt.Appendf(nil, "{\"bindings\": [\n{\"label\": %s, \"prefix\": \"192.0.2.0/24\"}]}", quoted))
		if (err == nil) != good || err != nil && !strings.HasPrefix(err.Error(), "b.json:2: ") {
			t.Errorf("%q in a file: %v", name, err)
		}
	}
}

// TestLongLabelIsCut: an error does not repeat a long name as a whole.
func TestLongLabelIsCut(t *testing.T) {
	if err := checkLabel(strings.Repeat("a", 1<<20)); !errors.Is(err, engine.ErrLabel) || len(err.Error()) > 1000 {
		t.Errorf("an error of %d bytes", len(fmt.Sprint(err)))
	}
}
