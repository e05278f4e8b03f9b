// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
)

// recover finishes or undoes a killed writer's change. The caller holds the lock, so no living process owns a change in
// progress.
func (l *WriteLock) recover() error {
	scopes, err := l.allNames(l.path)
	if err != nil {
		return err
	}
	for _, s := range scopes {
		if s == lockDir {
			continue
		}
		features, err := l.allNames(filepath.Join(l.path, s))
		if err != nil {
			return err
		}
		for _, f := range features {
			if err := l.recoverDir(filepath.Join(l.path, s, f)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (l *WriteLock) recoverDir(dir string) error {
	names, err := l.allNames(dir)
	if err != nil {
		return err
	}
	has := map[string]bool{}
	for _, n := range names {
		has[n] = true
	}
	for _, n := range names {
		if err := l.files().Remove(filepath.Join(dir, n, programPin)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		base, retired := strings.CutSuffix(n, retireSuffix)
		if retired && !has[base] && has[base+stagedSuffix] {
			// Killed between the two renames of a replacement: the new directory is complete.
			if err := l.files().Rename(filepath.Join(dir, base+stagedSuffix), filepath.Join(dir, base)); err != nil {
				return err
			}
			l.forgetDir(filepath.Join(dir, base))
			has[base], has[base+stagedSuffix] = true, false
		}
	}
	for _, n := range names {
		if base, staged := strings.CutSuffix(n, stagedSuffix); staged && has[n] {
			err = l.recoverStaged(filepath.Join(dir, base), filepath.Join(dir, n), has[base])
		} else if base, retired := strings.CutSuffix(n, retireSuffix); retired {
			err = l.endReplacement(filepath.Join(dir, base), filepath.Join(dir, n))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// recoverStaged completes an upgrade whose attachment already runs the new program. It removes any other staging
// directory.
func (l *WriteLock) recoverStaged(dir, staged string, published bool) error {
	if published {
		over, err := l.goneOver(staged)
		if err != nil {
			return err
		}
		if over {
			l.forgetDir(dir)
			return l.commit(staged, dir)
		}
	}
	return l.endReplacement(dir, staged)
}
