// SPDX-License-Identifier: Apache-2.0

package strictyaml_test

import (
	"fmt"
	"testing"

	"github.com/weir-project/weir/internal/strictyaml"
)

// color is an option with a fixed set of words.
type color string

func (c *color) UnmarshalText(b []byte) error {
	return strictyaml.Choice(c, b, "color", "red", "green")
}

func ExampleChoice() {
	var c color
	fmt.Println(c.UnmarshalText([]byte("green")), c)
	fmt.Println(c.UnmarshalText([]byte("blue")), c)
	// Output:
	// <nil> green
	// color "blue": want red, green green
}

// TestChoice checks that only exact words are accepted. A prefix or another case is rejected and
// changes nothing.
func TestChoice(t *testing.T) {
	for _, c := range []struct {
		text string
		want color
		err  string
	}{
		{"red", "red", ""},
		{"green", "green", ""},
		{"", "red", `color "": want red, green`},
		{"gre", "red", `color "gre": want red, green`},
		{"Green", "red", `color "Green": want red, green`},
		{"red\n", "red", `color "red\n": want red, green`},
	} {
		got := color("red")
		err := got.UnmarshalText([]byte(c.text))
		if got != c.want || (err == nil) != (c.err == "") || err != nil && err.Error() != c.err {
			t.Errorf("%q: %q, %v; want %q, %s", c.text, got, err, c.want, c.err)
		}
	}
}
