// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/weir-project/weir/feature"
)

// socketPaths are the paths of weir serve's Unix sockets. After the loss of a path, as by rm -rf /run/weir, nobody can
// connect, although the socket exists.
type socketPaths struct {
	paths []string

	mu   sync.Mutex
	had  map[string]bool // existed once
	lost map[string]bool
}

func newSocketPaths(o ServeOptions) *socketPaths {
	s := &socketPaths{had: map[string]bool{}, lost: map[string]bool{}}
	for _, p := range append(slices.Collect(maps.Values(o.Sockets)), o.Socket) {
		if p != "" && !strings.HasPrefix(p, "@") {
			s.paths = append(s.paths, p)
		}
	}
	slices.Sort(s.paths)
	return s
}

// failure returns an error about the lost paths.
func (s *socketPaths) failure() error {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, p := range s.paths {
		if s.lost[p] {
			errs = append(errs, fmt.Errorf("socket %s was removed, nobody can connect: restart weir serve", p))
		}
	}
	return errors.Join(errs...)
}

// watch checks the paths until ctx is done.
func (s *socketPaths) watch(ctx context.Context, log *slog.Logger) {
	for range (feature.Loop{Every: checkEvery, Later: true}).Turns(ctx) {
		for _, p := range s.paths {
			st, err := os.Lstat(p)
			if err == nil && st.Mode().Type() != fs.ModeSocket { // nobody can connect to it either
				err = fs.ErrNotExist
			}
			s.note(p, err, log)
		}
	}
}

// note records the presence of a path. Another keeper may have its own socket there, so only absence is a loss.
func (s *socketPaths) note(path string, err error, log *slog.Logger) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch gone := errors.Is(err, fs.ErrNotExist); {
	case err == nil:
		s.had[path], s.lost[path] = true, false
	case gone && s.had[path] && !s.lost[path]:
		s.lost[path] = true
		log.Error("socket was removed, nobody can connect: restart weir serve", "socket", path)
	}
}
