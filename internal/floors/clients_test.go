// SPDX-License-Identifier: Apache-2.0

package floors

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// maxClient is the maximum number of packages outside the standard library in a program with one
// client, including the client.
const maxClient = 14

// TestClients counts the packages of each Go client.
func TestClients(t *testing.T) {
	root := repository(t)
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("need: tool go")
	}
	list := func(args ...string) []string {
		c := exec.Command("go", append([]string{"list"}, args...)...)
		c.Dir = root
		out, err := c.Output()
		if err != nil {
			t.Fatal(err)
		}
		return strings.Fields(string(out))
	}
	clients := list("./" + filepath.Join("clients", "go") + "/...")
	if len(clients) == 0 {
		t.Fatal("no clients in clients/go")
	}
	for _, c := range clients {
		if all := list("-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", c); len(all) > maxClient {
			t.Errorf("%s pulls in %d packages, want %d at most:\n%s", c, len(all), maxClient, strings.Join(all, "\n"))
		}
	}
}
