"""A folder on any file system that Spark knows."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Folder:
    """A folder; paths are relative to it."""

    def __init__(self, spark: "SparkSession", root: str) -> None:
        self._jvm = spark._jvm
        self._root = self._jvm.org.apache.hadoop.fs.Path(root)
        self._fs = self._root.getFileSystem(spark._jsc.hadoopConfiguration())

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, path)

    def exists(self, path: str) -> bool:
        return bool(self._fs.exists(self._path(path)))

    def delete(self, path: str) -> None:
        self._fs.delete(self._path(path), True)

    def move(self, path: str, to: str) -> None:
        if not self._fs.rename(self._path(path), self._path(to)):
            raise OSError(f"{self._path(path)} could not be moved to {self._path(to)}")

    def names(self, path: str) -> list[str]:
        if not self.exists(path):
            return []
        return sorted(one.getPath().getName() for one in self._fs.listStatus(self._path(path)))

    def text(self, path: str) -> str:
        """The content of a file."""
        stream = self._fs.open(self._path(path))
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def write(self, path: str, text: str) -> None:
        """Make a file."""
        stream = self._fs.create(self._path(path))
        try:
            stream.write(text.encode())
        finally:
            stream.close()

    def note(self, path: str, name: str) -> None:
        """Make an empty file of this name the only file in a folder."""
        self._fs.create(self._path(f"{path}/{name}")).close()
        for other in self.names(path):
            if other != name:
                self.delete(f"{path}/{other}")
