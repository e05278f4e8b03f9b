// SPDX-License-Identifier: Apache-2.0

package floors

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// doors are calls reserved for one package, most of them because strangers are at the other end.
var doors = map[string]string{
	"MustNewConstMetric(": "internal/scrape", // scrape.Const makes labels harmless
	"promhttp.":           "internal/scrape",
	"http.Server{":        "internal/accept", // accept.HTTP bounds connections
	".Accept()":           "internal/accept", // accept.New bounds them, too
	".AcceptUnix()":       "internal/accept",
	"unix.Getsockname(":   "internal/bounded", // only bounded.Getsockname may wait for a socket's lock
	"unix.Getpeername(":   "internal/bounded",

	// A listing of a changing host fails: dump lists again.
	"netlink.LinkList": "internal/dump", "netlink.AddrList(": "internal/dump", "netlink.NeighList(": "internal/dump", "netlink.RouteList(": "internal/dump",
	"netlink.RouteListFiltered(": "internal/dump", "netlink.RuleList(": "internal/dump", "netlink.FilterList(": "internal/dump", "netlink.QdiscList(": "internal/dump",
}

// others may accept by themselves: the listener for applications, test helpers, experiments and
// examples.
var others = []string{"clients/go/handoff/listener.go", "internal/nstest/", "lab/", "vm/", "examples/", "collector/"}

func TestFloorsDoors(t *testing.T) {
	root := repository(t)
	files := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		name, _ := filepath.Rel(root, path) // both are absolute
		if err != nil || d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return err
		}
		for _, o := range others {
			if strings.HasPrefix(name, o) {
				return nil
			}
		}
		files++
		text, err := os.ReadFile(path)
		for call, in := range doors {
			if strings.Contains(string(text), call) && filepath.Dir(name) != in {
				t.Errorf("%s calls %s: only %s does", name, call, in)
			}
		}
		return err
	})
	if err != nil || files < 100 {
		t.Fatal(files, err)
	}
}
