// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Options are the options of a run.
type Options struct {
	Size    Size
	Seed    uint64
	Control bool // without weir
	Watch   Watcher
	// Pictures is a directory for the pictures of the run; "" for none.
	Pictures string
	Keep     string // directory for the files of the run, logs and output of every peer; "" for none
}

// Execute runs an experiment, cleans up and counts the leftovers. It also returns a result with its error
// if the run failed or was interrupted.
func Execute(ctx context.Context, x Experiment, o Options) (*Result, error) {
	r := NewResult(x.Name, o.Size, o.Seed)
	e, err := NewEnv(o.Size, o.Seed)
	if err != nil {
		return r, err
	}
	defer e.Close() // also when the experiment panics
	e.Control = o.Control
	if o.Watch != nil {
		e.Watch = o.Watch
	}
	err = x.Run(ctx, e, r)
	if o.Keep != "" {
		if copyErr := keepFiles(e.Dir, o.Keep); copyErr != nil {
			r.Note("some files were not kept: %v", copyErr)
		}
	}
	if o.Pictures != "" && err == nil {
		err = r.keepPictures(e.Dir, o.Pictures)
	}
	e.Watch.Log("cleaning up: processes, namespaces, pins")
	e.Close()
	left := e.Leftovers()
	for _, l := range left {
		r.Note("left behind: %s", l)
	}
	r.Set(LeftoversMetric, r.Metrics[LeftoversMetric]+float64(len(left)))
	if err != nil {
		if len(left) > 0 {
			err = fmt.Errorf("%w; also left behind: %v", err, left)
		}
		return r, err
	}
	r.Claim(Correctness, "nothing is left behind, after the run and after Ctrl-C", LeftoversMetric, "== 0")
	r.conclude()
	return r, nil
}

// keepPictures copies the pictures of the run.
func (r *Result) keepPictures(from, to string) error {
	drawn, err := filepath.Glob(filepath.Join(from, "*.svg"))
	for _, path := range drawn {
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name := filepath.Base(path)
		if err := os.WriteFile(filepath.Join(to, name), b, 0o644); err != nil {
			return err
		}
		r.Pictures = append(r.Pictures, name)
	}
	return err
}

// keepFiles copies the regular files of a run. It skips sockets of daemons.
func keepFiles(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, name)
		if d.IsDir() {
			return os.MkdirAll(target, 0o755)
		}
		if !d.Type().IsRegular() {
			return nil
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(target, data, 0o644)
	})
}
