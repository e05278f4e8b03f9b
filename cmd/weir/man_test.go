// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/cmd/weir/manpages"
)

// TestManPages checks that every command has a page, and that pages keep the lines of tables.
func TestManPages(t *testing.T) {
	dir := t.TempDir()
	if err := manpages.Write(newCommand(), dir, "1.2.3", time.Unix(0, 0).UTC()); err != nil {
		t.Fatal(err)
	}
	page := func(name string) string {
		text, err := os.ReadFile(filepath.Join(dir, strings.ReplaceAll(name, " ", "-")+".8"))
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		return string(text)
	}
	commands := allCommands(newCommand())
	for _, c := range commands {
		if c.IsAvailableCommand() && c.Name() != "help" {
			page(c.CommandPath())
		}
	}
	if len(commands) < 60 {
		t.Errorf("only %d commands", len(commands))
	}
	for _, c := range []struct{ page, want string }{
		{"weir", ".EX\n  weir doctor "},
		{"weir", "WEIR_ROOT or"},
		{"weir steer where", "--slots int "},
		{"weir steer where", "slot and process of source addresses or devices."}, // it has a short text only
	} {
		if text := page(c.page); !strings.Contains(text, c.want) {
			t.Errorf("page %s lacks %q:\n%s", c.page, c.want, text)
		}
	}
}
