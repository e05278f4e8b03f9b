// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"fmt"
	"path"
	"strings"

	"github.com/weir-project/weir/internal/safefile"
)

const maxFile = 1 << 20

// names maps paths to names, as in a file.
type names map[string]string

// readNames reads a file of names. A line is a path and a name, like "/batch/nightly  reports". The name also applies to
// descendant cgroups without a line of their own. A # begins a comment.
func readNames(file string) (names, error) {
	f, err := safefile.Read(file, maxFile)
	if err != nil {
		return nil, err
	}
	out := names{}
	n := 0
	for line := range strings.Lines(string(f.Data)) {
		n++
		text, _, _ := strings.Cut(line, "#")
		words := strings.Fields(text)
		switch {
		case len(words) == 0:
			continue
		case len(words) != 2:
			return nil, fmt.Errorf("%s:%d: %d words: want a cgroup's path and its name, like /batch/nightly reports", file, n, len(words))
		case !strings.HasPrefix(words[0], "/"):
			return nil, fmt.Errorf("%s:%d: path %q: want one from the root of the hierarchy, like /batch/nightly", file, n, words[0])
		}
		p := path.Clean(words[0])
		if _, twice := out[p]; twice {
			return nil, fmt.Errorf("%s:%d: %s is named twice: remove one line", file, n, p)
		}
		out[p] = words[1]
	}
	return out, nil
}

// of returns the name of a cgroup or of its nearest named ancestor.
func (n names) of(p string) (string, bool) {
	for len(n) > 0 {
		if name, ok := n[p]; ok {
			return name, true
		}
		if p == "/" || p == "." {
			break
		}
		p = path.Dir(p)
	}
	return "", false
}

// identify names a cgroup. The file overrides its path.
func (n names) identify(p string) Name {
	name := Identify(p)
	if text, ok := n.of(p); ok {
		name.Kind, name.Text = File, text
	}
	return name
}
